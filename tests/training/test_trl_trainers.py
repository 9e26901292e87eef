"""TRL's GRPO, RLOO, DPO and SFT trainers: their log-probabilities are those of each row alone."""

import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from helpers.checkout import EXAMPLES
from helpers.models.chat_models import drawing, make_chat_model, question
from helpers.models.tiny_models import make_model, randomize
from hf_xattn import XAttnDataCollator, XAttnProcessor, retrofit


QUESTIONS = ["what is it ?", "how many cat in the picture ?"]
CHOSEN, REJECTED = "a dog", "an cat is a picture"
MARKER = "<image>"
# TRL looks for ends of turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' : ' }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
    "{{ ' [EOS] ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


@pytest.fixture
def trl(monkeypatch):
    """TRL, without the folder `examples/vllm` on the path, which it takes for vLLM."""
    trl = pytest.importorskip("trl", minversion="1.16")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(EXAMPLES)])
    if getattr(sys.modules.get("vllm"), "__file__", None) is None:
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return trl


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models without and with a marker of images, which stands outside the head or in it."""
    base = tmp_path_factory.mktemp("trl")
    folders = {"plain": make_chat_model(base, CHAT_TEMPLATE)}
    for name, in_head in (("marked", False), ("marked_in_head", True)):
        tokenizer = AutoTokenizer.from_pretrained(base / "text")
        options = {"image_token_id": len(tokenizer), "additional_vocab_size": 1, "additional_vocab_in_head": in_head}
        model = retrofit(base / "text", base / "vision", every=2, image_visibility="previous", **options)
        tokenizer.add_tokens([MARKER], special_tokens=True)
        images = AutoProcessor.from_pretrained(folders["plain"]).image_processor
        folders[name] = base / name
        randomize(model, scale=1.0).save_pretrained(folders[name])
        XAttnProcessor(images, tokenizer, CHAT_TEMPLATE, MARKER).save_pretrained(folders[name])
    return folders


def make_rows(counts):
    """One row for each number of pictures, with two questions in turn."""
    return [
        {
            "prompt": [{"role": "user", "content": QUESTIONS[index % 2]}],
            "images": [drawing(10 * index + number) for number in range(count)],
        }
        for index, count in enumerate(counts)
    ]


def inputs_of(processor, row):
    """The prompt of a row alone, without padding."""
    chat = [question(row["prompt"][0]["content"], *row["images"])]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(chat, **options)


@torch.no_grad()
def by_hand(model, inputs, completion):
    """The log-probability of each token of a completion, `(length,)`."""
    ids = torch.cat([inputs["input_ids"], completion[None]], dim=1)
    pixels = {"pixel_values": inputs["pixel_values"]} if "pixel_values" in inputs else {}
    logits = model(input_ids=ids, **pixels, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]


def arguments(trl, kind, folder, **options):
    common = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    common |= {"report_to": [], "use_cpu": True, "bf16": False, "logging_steps": 1}
    return getattr(trl, f"{kind}Config")(output_dir=str(folder), **common, **options)


def online(trl, kind, folder, rows, tmp_path, **options):
    """Trains two steps with completions that the model makes. Returns the trainer and what each forward was off."""
    datasets = pytest.importorskip("datasets")
    processor = AutoProcessor.from_pretrained(folder)
    asked = [inputs_of(processor, row) for row in rows]
    off = []

    class Compared(getattr(trl, f"{kind}Trainer")):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *args, **kwargs):
            made = super()._get_per_token_logps_and_entropies(model, ids, mask, keep, *args, **kwargs)
            for row, line in enumerate(ids):
                real = mask[row].bool()
                prompt, completion = line[:-keep][real[:-keep]], line[-keep:][real[-keep:]]
                inputs = next(each for each in asked if each["input_ids"][0].equal(prompt))
                expected = by_hand(self.accelerator.unwrap_model(model), inputs, completion)
                off.append(float((made[0][row, : len(completion)].detach() - expected).abs().max()))
            return made

    trainer = Compared(
        model=str(folder),
        reward_funcs=lambda completions, **_: [float(index % 2) for index in range(len(completions))],
        args=arguments(trl, kind, tmp_path, num_generations=2, max_completion_length=6, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
    )
    trainer.train()
    return trainer, off


@pytest.mark.parametrize(
    "kind, name, count",
    [
        *[("GRPO", name, count) for name in ("plain", "marked") for count in (0, 1, 2)],
        ("RLOO", "plain", 1),
        ("RLOO", "marked", 2),
    ],
)
def test_online_trainers_score_each_row_as_it_is_alone(kind, name, count, trl, folders, tmp_path):
    """Padding that is a part of prompts, pictures of another row, or a model without a marker that cannot generate."""
    trainer, off = online(trl, kind, folders[name], make_rows([count] * 2), tmp_path)
    start = AutoModelForImageTextToText.from_pretrained(folders[name])
    assert len(off) >= 8 and max(off) < 1e-4
    assert not trainer.model.blocks[0].attn.q_proj.weight.equal(start.blocks[0].attn.q_proj.weight) or not count


@pytest.mark.parametrize(
    "name, counts, beta",
    [
        ("plain", [2, 1], 0.0),
        ("plain", [2, 0], 0.0),
        ("plain", [1, 0], 0.0),
        ("plain", [2, 1], 0.1),
        ("marked", [2, 1], 0.0),
    ],
)
def test_other_numbers_of_pictures_are_refused_online(name, counts, beta, trl, folders, tmp_path):
    """Padding that counts as a picture, because TRL leaves out `image_mask`."""
    with pytest.raises((ValueError, TypeError), match="image_mask"):
        online(trl, "GRPO", folders[name], make_rows(counts), tmp_path, beta=beta)


@pytest.mark.parametrize(
    "name, counts",
    [
        *[("plain", counts) for counts in ([0, 0], [1, 1], [2, 2], [2, 1], [2, 0])],
        ("marked", [1, 1]),
        ("marked", [2, 0]),
    ],
)
def test_dpo_scores_each_row_as_it_is_alone(name, counts, trl, folders, tmp_path):
    """Pictures of another row, or padding that counts as one."""
    datasets = pytest.importorskip("datasets")
    answers = {"chosen": CHOSEN, "rejected": REJECTED}
    rows = [
        row | {side: [{"role": "assistant", "content": text}] for side, text in answers.items()}
        for row in make_rows(counts)
    ]
    trainer = trl.DPOTrainer(
        model=str(folders[name]), args=arguments(trl, "DPO", tmp_path), train_dataset=datasets.Dataset.from_list(rows)
    )
    start = AutoModelForImageTextToText.from_pretrained(folders[name])
    processor = trainer.processing_class
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "logps/chosen" in entry)
    for side, text in answers.items():
        completion = processor.tokenizer(f"{text} [EOS]", return_tensors="pt")["input_ids"][0]
        expected = [by_hand(start, inputs_of(processor, row), completion).sum() for row in rows]
        assert abs(first[f"logps/{side}"] - float(torch.stack(expected).mean())) < 1e-3
    assert not trainer.model.blocks[0].attn.q_proj.weight.equal(start.blocks[0].attn.q_proj.weight) or not any(counts)


@pytest.mark.parametrize("name, counts", [("plain", [2, 1]), ("marked", [2, 2]), ("marked", [1, 0])])
def test_sft_has_the_loss_of_each_row_alone(name, counts, trl, folders, tmp_path):
    """A loss of other pictures, or of padding."""
    datasets = pytest.importorskip("datasets")
    rows = [row | {"completion": [{"role": "assistant", "content": CHOSEN}]} for row in make_rows(counts)]
    start = AutoModelForImageTextToText.from_pretrained(folders[name])
    processor = AutoProcessor.from_pretrained(folders[name])
    trainer = trl.SFTTrainer(
        model=str(folders[name]),
        args=arguments(trl, "SFT", tmp_path),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
        data_collator=XAttnDataCollator(processor),
    )
    trainer.train()
    completion = processor.tokenizer(f"{CHOSEN} [EOS]", return_tensors="pt")["input_ids"][0]
    expected = torch.cat([by_hand(start, inputs_of(processor, row), completion) for row in rows])
    assert abs(trainer.state.log_history[0]["loss"] + float(expected.mean())) < 1e-3


@pytest.mark.parametrize("kind", ["SFT", "GRPO", "DPO"])
def test_tokens_in_the_head_are_refused(kind, trl, folders, tmp_path):
    """Probabilities of a head that lacks a part."""
    datasets = pytest.importorskip("datasets")
    answers = {side: [{"role": "assistant", "content": CHOSEN}] for side in ("chosen", "rejected", "completion")}
    needed = {"SFT": ["completion"], "GRPO": [], "DPO": ["chosen", "rejected"]}[kind]
    rows = [row | {side: answers[side] for side in needed} for row in make_rows([1, 1])]
    extra = {"reward_funcs": len} if kind == "GRPO" else {}
    settings = {"num_generations": 2} if kind == "GRPO" else {}
    with pytest.raises(ValueError, match=r"additional_vocab_in_head=False.*got 1 tokens.*lm_head.weight"):
        getattr(trl, f"{kind}Trainer")(
            model=str(folders["marked_in_head"]),
            args=arguments(trl, kind, tmp_path, **settings),
            train_dataset=datasets.Dataset.from_list(rows),
            **extra,
        )


def test_a_real_image_of_zeros():
    """A black picture that is always taken for padding."""
    model = make_model()
    pixels = torch.zeros(1, 2, 3, 32, 32)
    given = {"input_ids": torch.tensor([[5, 6]]), "pixel_values": pixels, "use_cache": False}
    with pytest.raises(ValueError, match="image 0 of row 0 in `pixel_values` holds only zeros.*If this image is real"):
        model.model(**given)
    model.model(**given, image_mask=torch.ones(1, 2, dtype=torch.bool))
    model(**given)
