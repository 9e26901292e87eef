"""Serves a small model on vLLM, and asks it with and without a picture. Without a download: the weights are random.

The answers are compared with those of `generate`. On a GPU, or with your own model, the same command starts the server;
see README.md beside this file.

python examples/vllm/serve_and_ask.py
"""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM


try:
    import vllm.version  # noqa: F401  # the server is a process of its own
except ImportError as error:
    sys.exit(
        f'This example needs vLLM: pip install ".[vllm]", or as the guide says for a machine without a GPU ({error})'
    )

sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is

from tiny_chat import CHAT_TEMPLATE, drawings
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint
from transformers import AutoImageProcessor, AutoTokenizer

from hf_xattn import XAttnForConditionalGeneration, XAttnProcessor, retrofit


PORT = 8431
ADDRESS = f"http://127.0.0.1:{PORT}"


def make_model(folder: Path) -> tuple[XAttnForConditionalGeneration, XAttnProcessor]:
    """A model with heads of 32, which vLLM's CPU kernels take, and its processor. Both are saved to `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(make_text_checkpoint(folder / "words"))
    vision = make_vision_checkpoint(folder / "vision")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
    text = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    )
    model = retrofit(text, vision, every=2, cross_attention={"zero_init": False}).eval()
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(vision), tokenizer, chat_template=CHAT_TEMPLATE)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    return model, processor


def start_server(folder: Path) -> subprocess.Popen:
    """What `vllm serve FOLDER` does. Returns when the server answers."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(PORT)]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    memory = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # gigabytes; read on a machine without a GPU
    log = (folder.parent / "server.log").open("w")
    server = subprocess.Popen([*command, *options], env={**memory, **os.environ}, stdout=log, stderr=log)
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{ADDRESS}/health"):
                return server
        except urllib.error.URLError:
            if server.poll() is not None:
                break
            time.sleep(0.5)
    server.terminate()
    raise RuntimeError((folder.parent / "server.log").read_text()[-3000:])


def ask(content: list[dict], model: str) -> list[int] | str:
    """The tokens of the answer, or the error."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{ADDRESS}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        return f"{error.code}: {json.load(error)['error']['message']}"


def data_url(picture: Image.Image) -> str:
    made = io.BytesIO()
    picture.save(made, "PNG")
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def generated(model: XAttnForConditionalGeneration, processor: XAttnProcessor, content: list[dict]) -> list[int]:
    chat = [{"role": "user", "content": content}]
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


def main(folder: Path) -> None:
    model, processor = make_model(folder)
    name = str(folder / "model")
    one, other = list(drawings().values())[:2]
    question = {"type": "text", "text": "what is in the picture ?"}
    server = start_server(folder / "model")
    try:
        for title, pictures in (("one picture", [one]), ("two pictures", [one, other]), ("no picture", [])):
            urls = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in pictures]
            images = [{"type": "image", "image": each} for each in pictures]
            served, own = ask([*urls, question], name), generated(model, processor, [*images, question])
            print(f"{title}: the answer of `generate`: {served == own}", "" if served == own else (served, own))
        broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        print(f"a broken picture: {ask([broken, question], name)}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
