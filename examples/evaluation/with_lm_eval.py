"""Runs a model in lm-eval: on texts beside its base, and on pictures beside `hf-xattn eval`.

python examples/evaluation/with_lm_eval.py

The small model is trained on a few pictures. The guide has the same runs as commands, for your own model.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_xattn  # AutoConfig knows our models now; in a shell, `lm_eval --trust_remote_code` does it


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import COLOURS, SHAPES, drawings, make_chat_model


try:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
except ImportError:
    sys.exit('This example needs lm-eval: pip install ".[eval]"')

TASKS = Path(__file__).parent / "tasks"
TEXT, PICTURES = ["text_choice", "text_answer"], ["held_out"]
QUESTION, UNKNOWN = "what is in the picture ?", "which colour is it ?"  # the model is trained on one of them
MAX_NEW_TOKENS = 16  # as in the tasks


def run(kind: str, model: str, tasks: list[str], **options: Any) -> tuple[dict[str, Any], dict[str, list]]:
    """lm-eval's figures of each task, and its answers: texts, or log-likelihoods of the choices."""
    found = simple_evaluate(
        model=kind,
        # lm-eval wants a name for the place of a picture. Our model has none, and its chat template needs none.
        model_args={"pretrained": model, **({"image_string": "<image>"} if kind == "hf-multimodal" else {})},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        batch_size=4,
        device="cpu",
        **options,
    )
    return found["results"], {task: [each["resps"] for each in rows] for task, rows in found["samples"].items()}


def make_data(folder: Path) -> None:
    """Pictures to train on, the same ones with another question too, and questions without a picture."""
    for name, questions in (("pictures", [QUESTION]), ("held_out", [QUESTION, UNKNOWN])):
        (folder / name).mkdir()
        lines = []
        for index, (caption, picture) in enumerate(drawings().items()):
            picture.save(folder / name / f"{index}.png")
            answers = {QUESTION: caption, UNKNOWN: caption.split()[1]}
            lines += [{"file_name": f"{index}.png", "question": each, "answer": answers[each]} for each in questions]
        (folder / name / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = [
        {"question": f"how many {thing} in the {place}", "choices": [*COLOURS, *SHAPES], "answer": index}
        for thing in ("dog", "cat", "house")
        for index, place in enumerate((*COLOURS, *SHAPES))
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))


def main(folder: Path) -> None:
    os.chdir(folder)  # the tasks read their data in the working directory
    make_chat_model(folder)
    make_data(folder)
    options = ("--steps", "40", "--batch-size", "4", "--learning-rate", "0.01")
    if status := hf_xattn.main(["train", "model", "--data", "pictures", "--output", "seeing", *options]):
        sys.exit(status)

    (base, of_base), (seeing, of_seeing) = (run("hf", name, TEXT) for name in ("text", "seeing"))
    accuracy, accuracy_of_base = (each["text_choice"]["acc,none"] for each in (seeing, base))
    print(f"text_choice: acc {accuracy:.4f}, of the base {accuracy_of_base:.4f}")
    print(f"all figures are the base's, digit for digit: {seeing == base}")
    print(f"log-likelihoods and answers too: {of_seeing == of_base}")

    found, said = run("hf-multimodal", "seeing", PICTURES, apply_chat_template=True)
    model = AutoModelForImageTextToText.from_pretrained("seeing").eval()
    processor = AutoProcessor.from_pretrained("seeing")
    questions = hf_xattn.questions_of(hf_xattn.load_rows("held_out"))
    ours = hf_xattn.evaluate(model, processor, questions, batch_size=4, max_new_tokens=MAX_NEW_TOKENS)
    answers, right = [each.said for each in ours.answers["the model"]], ours.ways["the model"].exact
    print(f"pictures: {found['held_out']['exact_match,stripped']:.4f} in lm-eval, {right.value:.4f} in hf-xattn eval")
    same = sum(one == other[0][0] for one, other in zip(answers, said["held_out"]))
    print(f"the same answers: {same} of {len(answers)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
