"""The loss is the mean over the labels that count, in `forward` and through `Trainer`."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, default_data_collator

from helpers.inputs.collator_rows import SHORT
from helpers.models.marked_models import MARKER
from helpers.models.template_models import CHATML, make_chat_model, make_processor
from helpers.models.tiny_decoders import make_tiny, retrofitted
from helpers.models.tiny_models import VOCAB_SIZE, make_model, pixels, token_ids
from helpers.processes.training_runs import arguments
from hf_xattn import XAttnDataCollator, XAttnForConditionalGeneration, freeze_base, sharding_units


IMAGE_TOKEN = 5


class Marked(torch.utils.data.Dataset):
    """Texts with image markers and other numbers of labels that count; each row is a micro-batch."""

    def __init__(self, rows=4, with_images=True):
        self.ids, self.pixels, self.with_images = token_ids(rows, 8), pixels(rows), with_images
        self.labels = self.ids.clone()
        for row in range(rows):
            self.ids[row, 1 : 2 + row] = MARKER
            self.labels[row] = self.ids[row]
            self.labels[row, 7 - row % 3 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        row = {"input_ids": self.ids[index], "labels": self.labels[index]}
        return row | ({"pixel_values": self.pixels[index]} if self.with_images else {})

    def batch(self, *rows):
        rows = list(rows)
        return {"input_ids": self.ids[rows], "labels": self.labels[rows], "pixel_values": self.pixels[rows]}


def mean_by_hand(model, data, rows):
    """The mean over all labels of `rows` but -100 and markers, in one number."""
    losses = []
    for row in rows:
        batch = data.batch(row)
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1]
        counts = (labels != -100) & (labels != MARKER)
        losses.append(cross_entropy(logits[counts], labels[counts], reduction="none"))
    return torch.cat(losses).mean()


def masking(model):
    """A collator of one's own, as the error of `forward` advises."""

    def collate(rows):
        batch = default_data_collator(rows)
        return batch | {"labels": model.mask_labels(batch["labels"])}

    return collate


def train(model, data, folder, collate=None, **options):
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 4, "max_steps": 1} | options
    options |= {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    given = arguments(folder, train_sampling_strategy="sequential", **options)
    trainer = Trainer(model, given, collate, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer, next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("steps, smoothing", [(1, 0.0), (2, 1e-9), (4, 0.0)])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, steps, smoothing):
    """A sum that is divided by the number of all labels, markers among them; a mean of means; labels that are not
    shifted.
    """
    data = Marked()
    twin = freeze_base(make_model(image_token_id=MARKER))
    expected = mean_by_hand(twin, data, range(steps))
    expected.backward()

    model = freeze_base(make_model(image_token_id=MARKER))
    options = {"gradient_accumulation_steps": steps, "label_smoothing_factor": smoothing}
    trainer, found = train(model, data, tmp_path, masking(model), **options)
    assert found == pytest.approx(expected.item(), abs=1e-4)
    for (name, weight), start in zip(model.named_parameters(), twin.parameters()):
        moved = 0.0 if start.grad is None else 0.1 * start.grad
        assert torch.allclose(weight, start - moved, atol=1e-5), name

    expected = mean_by_hand(model.eval(), data, range(4)).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)


def test_markers_that_trainer_counts(tmp_path):
    """A collator that leaves markers in the labels: a loss that is too small without a word, in training or
    evaluation.
    """
    data, model = Marked(), freeze_base(make_model(image_token_id=MARKER))
    expected = mean_by_hand(model, data, [0]).item()
    trainer, found = train(model, data, tmp_path)
    assert found == pytest.approx(expected, abs=1e-4)
    expected = mean_by_hand(model.eval(), data, range(4)).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match=r"in the collator.*`labels = model.mask_labels\(labels\)`"):
        train(model, data, tmp_path, gradient_accumulation_steps=2)


def test_labels_of_the_data_set_are_not_changed(tmp_path):
    """Labels masked in the caller's tensors."""
    data = Marked()
    before = data.labels.clone()
    train(freeze_base(make_model(image_token_id=MARKER)), data, tmp_path)
    assert torch.equal(data.labels, before)
    model = make_model(image_token_id=MARKER)
    assert torch.equal(model.mask_labels(before), before.masked_fill(before == MARKER, -100))
    assert torch.equal(data.labels, before)


# --- `forward`


OPTIONS = {
    "decoder": {},
    "added_rows": {"additional_vocab_size": 3, "additional_vocab_in_head": True},
    "added_inputs": {"additional_vocab_size": 3, "image_token_id": VOCAB_SIZE + 1},
}


def shifted(labels):
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_argument_of_the_loss(options):
    """`shift_labels` with markers in them, or that the loss over added rows does not look at; a number of items that
    is lost.
    """
    model = make_model(**{"image_token_id": MARKER} | options)
    marker, ids = model.config.image_token_id, token_ids(2, 8)
    ids[:, 2:4] = marker
    labels = ids.clone()
    labels[0, 5:] = -100
    other = shifted(labels).roll(1, dims=0)  # says something else than `labels`
    logits = model(ids, pixel_values=pixels()).logits.flatten(0, 1)

    def expected(labels, items=None):
        labels = labels.masked_fill(labels == marker, -100).flatten()
        mean = cross_entropy(logits, labels)
        return mean if items is None else mean * labels.ne(-100).sum() / items

    for given, used in (
        ({"labels": labels}, shifted(labels)),
        ({"labels": labels, "shift_labels": other}, other),
        ({"shift_labels": other}, other),
    ):
        assert torch.allclose(model(ids, pixel_values=pixels(), **given).loss, expected(used), atol=1e-5)
        masked = {name: model.mask_labels(value) for name, value in given.items()}
        for items in (40, torch.tensor(40), torch.tensor([40.0])):
            found = model(ids, pixel_values=pixels(), **masked, num_items_in_batch=items).loss
            assert torch.allclose(found, expected(used, items), atol=1e-5)
            with pytest.raises(ValueError, match="Expected `labels` with -100 in place of image markers"):
                model(ids, pixel_values=pixels(), **given, num_items_in_batch=items)
        # Counted as `Trainer` counts, with the markers.
        items = used.ne(-100).sum()
        found = model(ids, pixel_values=pixels(), **given, num_items_in_batch=items).loss
        assert torch.allclose(found, expected(used), atol=1e-5)
    assert model(ids, pixel_values=pixels()).loss is None
    assert model(ids, pixel_values=pixels(), num_items_in_batch=4).loss is None


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_another_index_that_is_ignored(options):
    """Markers that become -100 where another number stands for no label: an index outside of the logits."""
    model, ids = make_model(**{"image_token_id": MARKER} | options), token_ids(2, 8)
    ids[:, 2] = model.config.image_token_id
    labels = ids.clone()
    labels[0, 5:] = 0
    found = model(ids, pixel_values=pixels(), labels=labels, ignore_index=0).loss
    expected = model(ids, pixel_values=pixels(), labels=labels.masked_fill(labels == 0, -100)).loss
    assert torch.allclose(found, expected, atol=1e-6)


def test_slices_of_longer_labels_give_the_same_loss():
    """Shifted labels that are a part of a longer row, which torch cannot view as one row."""
    model, ids, images = make_model(), token_ids(2, 9), pixels()
    kept = {"pixel_values": images, "logits_to_keep": 4}
    part = ids[:, 2:6]
    assert not part.is_contiguous()
    losses = [model(ids, shift_labels=each, **kept).loss for each in (part, part.contiguous())]
    assert torch.equal(*losses)


def test_shift_labels_are_checked():
    """Labels of another text."""
    model, ids = make_model(image_token_id=MARKER), token_ids()
    with pytest.raises(ValueError, match="Expected `shift_labels`"):
        model(ids, pixel_values=pixels(), labels=ids, shift_labels=ids[:, 1:])


def test_a_batch_of_markers_alone_has_a_loss_of_zero():
    """Zero divided by zero, where no label of a micro-batch counts."""
    model, ids = make_model(image_token_id=MARKER).train(), token_ids()
    labels = torch.full_like(ids, MARKER)
    loss = model(ids, pixel_values=pixels(), labels=labels, num_items_in_batch=labels[:, 1:].numel()).loss
    assert loss == 0
    loss.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


def test_balancing_loss_of_experts_stays():
    """A loss over added rows without the balancing loss that the decoder adds to its own."""
    ids, images = token_ids(), pixels()
    model = make_model("mixtral", additional_vocab_size=3, additional_vocab_in_head=True)
    plain = model(ids, pixel_values=images, labels=ids).loss
    outputs = model(ids, pixel_values=images, labels=ids, output_router_logits=True)
    assert torch.allclose(outputs.loss, plain + 0.001 * outputs.aux_loss, atol=1e-6) and outputs.aux_loss > 0


@pytest.mark.slow
def test_compiled_losses_refuse_markers_too():
    """Compiled code, which cannot raise by itself: a loss that is too small."""
    model, data = make_model(image_token_id=MARKER), Marked()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = data.batch(0) | {"use_cache": False}
    own = batch["labels"][:, 1:].ne(-100).sum()
    expected = model(**batch).loss
    assert torch.allclose(compiled(**batch, num_items_in_batch=own).loss, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="in place of image markers"):
        compiled(**batch, num_items_in_batch=own + 3)


def test_processes_count_together(monkeypatch):
    """The average number of labels of several processes, which happens to be the number of this one's, markers
    included.
    """
    monkeypatch.setattr("hf_xattn.decoders.loss.is_distributed", lambda: True)
    model, batch = make_model(image_token_id=MARKER), Marked().batch(0)
    items = batch["labels"][:, 1:].ne(-100).sum()
    with pytest.raises(ValueError, match="several batches or processes"):
        model(**batch, num_items_in_batch=items)
    masked = batch | {"labels": model.mask_labels(batch["labels"])}
    assert model(**masked, num_items_in_batch=items).loss < model(**masked).loss


@torch.no_grad()
def test_labels_of_places_with_gaps():
    """Logits that are trained on the label of the next place given, not of the next token."""
    model, ids, images = make_model(), token_ids(2, 7), pixels(2, 1)
    labels = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    for places in ([1, 4, 6], [4, 3], [2, 2]):
        kept = torch.tensor(places)
        with pytest.raises(ValueError, match="`logits_to_keep` with `labels` to be positions side by side"):
            model(ids, pixel_values=images, labels=labels[:, places], logits_to_keep=kept)
    logits = model(ids, pixel_values=images).logits
    kept = torch.tensor([3, 4, 5])
    loss = model(ids, pixel_values=images, labels=labels[:, 3:6], logits_to_keep=kept).loss
    expected = torch.nn.functional.cross_entropy(logits[:, 3:5].flatten(0, 1), labels[:, 4:6].flatten())
    torch.testing.assert_close(loss, expected)
    kept = torch.tensor([1, 4])
    given = {"labels": labels[:, [1, 4]], "shift_labels": labels[:, [2, 5]], "logits_to_keep": kept}
    loss = model(ids, pixel_values=images, **given).loss
    expected = torch.nn.functional.cross_entropy(logits[:, kept].flatten(0, 1), labels[:, [2, 5]].flatten())
    torch.testing.assert_close(loss, expected)


def test_the_marker_of_a_hidden_image():
    """The text of a hidden picture, trained on the next one."""
    model = make_model(image_token_id=IMAGE_TOKEN, image_visibility="latest")
    ids = token_ids(1, 8)
    ids[0, 1] = ids[0, 4] = IMAGE_TOKEN
    hidden = torch.tensor([[False, True]])
    with pytest.raises(ValueError, match=r"\[2\] markers, and a hidden image in front of others"):
        model(ids, pixel_values=pixels(1, 2), image_mask=hidden, labels=ids, use_cache=False)
    ids[0, 1] = 7
    assert model(ids, pixel_values=pixels(1, 2), image_mask=hidden, labels=ids, use_cache=False).loss.isfinite()


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0], [0, 1, -1]])
def test_the_marker_of_a_hidden_image_of_shared_rows(rows):
    """The same where text rows name their images, in another order."""
    model, index = make_model(image_token_id=IMAGE_TOKEN, image_visibility="latest"), torch.tensor(rows)
    ids = token_ids(len(rows), 8)
    ids[ids == IMAGE_TOKEN] = 7
    ids[:, 1] = ids[:, 4] = IMAGE_TOKEN
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


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class OfAUser(XAttnForConditionalGeneration):
    pass


@pytest.mark.parametrize("kind", ["sharded", "derived"])
def test_label_smoothing_of_a_class_of_another_name(kind, mesh, tmp_path):
    """Labels that are not shifted: each token learns to predict itself."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor).eval()
    batch = XAttnDataCollator(processor)([SHORT])
    expected = model(**batch).loss
    options = {"label_smoothing_factor": 1e-9, "use_cpu": True, "report_to": "none", "remove_unused_columns": False}
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "out"), **options), train_dataset=[0])
    if kind == "sharded":
        for unit in (*sharding_units(model), model):
            fully_shard(unit, mesh=mesh)
    else:
        model.__class__ = OfAUser
    assert type(model).__name__ not in ("XAttnForConditionalGeneration",)
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected, rtol=1e-4, atol=1e-4)
