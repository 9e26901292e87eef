"""Asks a server about a picture with the client of the OpenAI API: two turns, the second one streamed.

A chat client sends the picture again at every turn. The server recognises it, and encodes it only once.

Start a server in another terminal with `hf-xattn serve MODEL`, which prints its address. Without arguments this script
makes a small model with random weights and starts a server for it.

python examples/chat_and_serving/ask_server.py [ADDRESS IMAGE]
"""

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

from openai import OpenAI


sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is


def main(address: str, image: Path) -> None:
    client = OpenAI(base_url=address, api_key="none")
    (model,) = [model.id for model in client.models.list()]
    url = f"data:image/{image.suffix[1:]};base64,{base64.b64encode(image.read_bytes()).decode()}"
    question = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is in the picture ?"}]
    messages = [{"role": "user", "content": question}]

    made = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
    answer = made.choices[0].message.content
    print(f"answer: {answer!r}")

    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "how many ?"}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, stream=True)
    print("streamed: ", end="")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def start_server(model: str) -> tuple[subprocess.Popen, str]:
    """Starts a server on a free port. Returns its process and its address."""
    command = [sys.executable, "-u", "-m", "hf_xattn.commands.main", "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if line.startswith("Ready: "):
            return server, line.split()[1]
    raise RuntimeError("The server did not start.")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(sys.argv[1], Path(sys.argv[2]))
    else:
        from tiny_chat import RANDOM_WEIGHTS, make_chat_model
        from tiny_checkpoints import make_picture

        with tempfile.TemporaryDirectory() as folder:
            make_chat_model(Path(folder))
            make_picture().save(Path(folder) / "picture.png")
            server, address = start_server(str(Path(folder) / "model"))
            print(RANDOM_WEIGHTS)
            try:
                main(address, Path(folder) / "picture.png")
            finally:
                server.terminate()
                server.wait()
