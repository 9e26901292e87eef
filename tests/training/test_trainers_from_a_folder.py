"""Trainers that start from a saved model: TRL's by its path, transformers' own with generation at evaluation."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Seq2SeqTrainer, Seq2SeqTrainingArguments

from helpers.models.chat_models import drawing, question
from hf_xattn import XAttnForConditionalGeneration


def test_sft_trainer_starts_from_a_path(chat_folder, tmp_path):
    """A folder that `SFTTrainer` cannot open, or opens without its blocks."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["what is in the picture ? a dog", "how many ? an cat"] * 2})
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-2
    )
    trainer = trl.SFTTrainer(model=str(chat_folder), args=arguments, train_dataset=rows)
    assert isinstance(trainer.model, XAttnForConditionalGeneration)
    start = AutoModelForImageTextToText.from_pretrained(chat_folder)
    assert trainer.model.blocks[0].attn.q_proj.weight.equal(start.blocks[0].attn.q_proj.weight)
    before = start.model.text_model.get_input_embeddings().weight
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    assert not trainer.model.model.text_model.get_input_embeddings().weight.equal(before)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_seq2seq_trainer_generates_from_images(chat_folder, tmp_path, num_beams):
    """Evaluation by generation that forgets the images, or that stumbles over the labels."""
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(chat_folder),
        AutoProcessor.from_pretrained(chat_folder),
    )
    rows = [
        processor.apply_chat_template(
            [question("what is it ?", drawing(seed))], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        for seed in range(3)
    ]

    def collate(batch):
        made = {name: torch.cat([torch.as_tensor(row[name]) for row in batch]) for name in batch[0]}
        return {**made, "labels": made["input_ids"]}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        predict_with_generate=True,
        generation_num_beams=num_beams,
        remove_unused_columns=False,
        per_device_eval_batch_size=2,
        per_device_train_batch_size=2,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=rows,
        processing_class=processor.tokenizer,
    )
    trainer.train()
    options = {"max_new_tokens": 6, "do_sample": False}
    predicted = torch.tensor(trainer.predict(rows, **options).predictions)
    model.eval()
    expected = [model.generate(**row, num_beams=num_beams, **options)[0] for row in rows]
    assert all(made[: len(tokens)].equal(tokens) for made, tokens in zip(predicted, expected))
    assert len({tuple(tokens.tolist()) for tokens in expected}) == 3
