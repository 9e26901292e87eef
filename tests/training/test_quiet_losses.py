"""What a training run leaves out, or takes in, without a word."""

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from helpers.inputs.collator_rows import LONG, SHORT, said
from helpers.models.template_models import CHATML, HEADERS, make_chat_model, make_processor, picture
from helpers.models.tiny_decoders import make_tiny, retrofitted
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import XAttnDataCollator, freeze_base
from hf_xattn.training.trainer import RunTrainer


MARKER = 5
ASKED = {"role": "user", "content": "draw it"}


def arguments(folder, **options):
    fixed = {"report_to": "none", "use_cpu": True, "remove_unused_columns": False, "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**fixed, **options})


def answer(*parts):
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return {"role": "assistant", "content": parts}


@pytest.mark.parametrize("last", ["text", "picture"])
def test_the_end_of_an_answer_with_a_picture(last):
    """An answer whose end is not trained, because a picture stands in front of it; or that of all other answers."""
    processor = make_processor(CHATML)
    drawn, plain = answer("here it is", {"type": "image", "image": picture()}), answer("a text")
    first, second = (drawn, plain) if last == "text" else (plain, drawn)
    batch = XAttnDataCollator(processor)([{"messages": [ASKED, first, ASKED, second]}])
    trained = "".join(said(processor, batch["labels"][0])).replace("<image>", "")
    words = {True: "here it is<|im_end|>", False: "a text<|im_end|>"}
    assert trained == words[first is drawn] + words[second is drawn]


def test_padding_predicts_nothing():
    """The first token of a shorter row, trained to follow padding."""
    processor = make_processor(HEADERS)
    model = make_chat_model(processor).eval()
    found = []
    for side in ("right", "left"):
        batch = XAttnDataCollator(processor, train_on="all", padding_side=side)([LONG, SHORT])
        with torch.no_grad():
            found.append((model(**batch).loss.item(), int((batch["labels"][:, 1:] != -100).sum())))
    assert found[0][1] == found[1][1] and found[0][0] == pytest.approx(found[1][0], abs=1e-6)


def test_gates_do_not_decay(tmp_path):
    """Blocks that weight decay closes."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor)
    freeze_base(model)
    trainer = RunTrainer(model=model, args=arguments(tmp_path, weight_decay=1.0), train_dataset=[LONG])
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    decays = {names[id(weight)]: group["weight_decay"] for group in groups for weight in group["params"]}
    gates = {name for name in decays if name.endswith("_gate")}
    assert len(gates) == 2 * len(model.blocks) and not any(decays[name] for name in gates)
    assert all(decay for name, decay in decays.items() if name.endswith("_proj.weight"))


def test_noise_on_a_frozen_embedding(tmp_path):
    """NEFTune that does nothing, because the frozen embedding is in evaluation mode."""
    processor = make_processor(CHATML)
    model, losses = make_chat_model(processor), []
    freeze_base(model)
    for alpha in (None, 500.0):
        options = {"max_steps": 1, "learning_rate": 0.0, "logging_steps": 1, "neftune_noise_alpha": alpha}
        collator = XAttnDataCollator(processor)
        trainer = Trainer(model, arguments(tmp_path, **options), data_collator=collator, train_dataset=[LONG] * 4)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] != losses[1]


def test_rows_without_pictures_are_told(caplog):
    """A run that trains nothing, because the column of images was lost."""
    logging.enable_propagation()
    processor = make_processor(CHATML)
    model = make_chat_model(processor).train()
    freeze_base(model)
    model(**XAttnDataCollator(processor)([SHORT])).loss.backward()
    assert "No row of this batch has an image, so it trains nothing" in caplog.text


def test_the_marker_of_a_hidden_image():
    """The text of a hidden picture, trained on the next one."""
    model = make_model(image_token_id=MARKER, image_visibility="latest")
    ids = token_ids(1, 8)
    ids[0, 1] = ids[0, 4] = MARKER
    hidden = torch.tensor([[False, True]])
    with pytest.raises(ValueError, match=r"\[2\] markers, and a hidden image in front of others"):
        model(ids, pixel_values=pixels(1, 2), image_mask=hidden, labels=ids, use_cache=False)
    ids[0, 1] = 7
    assert model(ids, pixel_values=pixels(1, 2), image_mask=hidden, labels=ids, use_cache=False).loss.isfinite()


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0], [0, 1, -1]])
def test_the_marker_of_a_hidden_image_of_shared_rows(rows):
    """The same where text rows name their images, in another order."""
    model, index = make_model(image_token_id=MARKER, image_visibility="latest"), torch.tensor(rows)
    ids = token_ids(len(rows), 8)
    ids[ids == MARKER] = 7
    ids[:, 1] = ids[:, 4] = MARKER
    hidden = torch.tensor([[True, True], [False, True]])
    given = {"pixel_values": pixels(2, 2), "image_mask": hidden, "image_rows": index, "labels": ids, "use_cache": False}
    with pytest.raises(ValueError, match="markers, and a hidden image in front of others"):
        model(ids, **given)
    ids[index == 1, 1] = 7
    assert model(ids, **given).loss.isfinite()


def test_the_loss_of_jetmoes_router():
    """A router that is not balanced, because its decoder has a name of its own for the weight of that loss."""
    model = retrofitted(make_tiny("jetmoe"))
    model.config.text_config.output_router_logits = True
    ids, states = token_ids(2, 8), torch.randn(2, 5, 16)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    losses = [
        model(ids, cross_attention_states=states, **{name: labels}).loss.item()
        for name, labels in (("labels", ids), ("shift_labels", shifted))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_no_label_that_is_ignored():
    """`ignore_index=None`, which is the default: -100 refused as a word outside the vocabulary."""
    model, ids = make_model(), token_ids(2, 8)
    labels = ids.masked_fill(torch.arange(8) < 3, -100)
    given = {"pixel_values": pixels(2, 1), "labels": labels}
    assert torch.equal(model(ids, ignore_index=None, **given).loss, model(ids, **given).loss)
