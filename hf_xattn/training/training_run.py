"""The training run of `hf-xattn train`: from rows with images to a folder with the trained model.

A run that was killed continues from the last complete checkpoint, with the same data and the same options, which are
saved beside the checkpoints. If there are several processes, each trains on its share of the rows of a step, and the
first one prints and writes files.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, Trainer, TrainerCallback, TrainerState, TrainingArguments, set_seed
from transformers.utils import logging

from ..checkpoints.adapters import check_bases
from ..checkpoints.model_card import write_model_card
from ..learning.activation_wrappers import WRAPPED
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing.chat_templates import check_template
from ..processing_xattn import XAttnProcessor
from ..utils.projection import multiplies_natively
from ..utils.tensor_checks import check_trainable
from .answer_spans import ends_of_turns
from .bad_rows import BAD_ROWS_FILE, Places, RowReader, StopsAtLimit
from .collator import XAttnDataCollator
from .freezing import freeze, train_in_float32
from .kept_text import KEPT_TEXT_FILE, DistillingCollator, digest_of_rows, text_rows
from .launch import is_first_process, num_processes, say
from .picture_use import PictureUse, PictureUseCallback
from .run_data import RunData
from .run_folder import CHECKPOINTS, KEPT, START, STATE, check_resumed, last_checkpoint, step_of, write_options
from .run_start import Rates, rates_of, start
from .trainer import RunTrainer, check_started_rate
from .training_options import SKIP, TrainingOptions
from .vision_features import VisionFeatures


SLOW_HALF = (
    "The frozen weights are in bfloat16, in which this CPU does not compute: a step takes many times as long as with "
    "`--dtype float32`."
)
SHARDS = "pytorch_model_fsdp_0"  # accelerate's folder for a model in a checkpoint of FSDP with SHARDED_STATE_DICT


def train(options: TrainingOptions, resume: bool = False) -> None:
    """Trains a model and saves it.

    The data are checked before the weights are loaded.

    Args:
        options ([`TrainingOptions`]): the options of the command.
        resume (`bool`, defaults to `False`): continue from the last complete checkpoint in `options.output`.

    Raises:
        ValueError: for bad data, for a model without a processor, and, with `resume`, for a folder of a run with other
            options or data.
    """
    if not is_first_process():
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    data = RunData(options)
    saved = options.saved(data.fingerprints())
    earlier = check_resumed(options.output, saved) if resume else {}
    saved |= {name: earlier[name] for name in (KEPT, START) if name in earlier}
    hub: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    processor = _processor(options.model, **hub)
    features = None if options.features is None else VisionFeatures.before_weights(options.features)
    collate = XAttnDataCollator(processor, max_length=options.max_length, padding_side="right", features=features)
    data.check(collate)
    data.say()
    if num_processes() > 1:
        say(f"{num_processes()} processes, each with {options.batch_size} examples per forward pass")

    set_seed(options.seed)
    model = _load_model(options, features, **hub)
    _end_with_the_turn(model, processor)
    half = model.dtype == torch.bfloat16
    dtypes = _prepare(model, options)
    if is_first_process():
        options.output.mkdir(parents=True, exist_ok=True)
        write_options(options.output, saved)
        data.write_bad_rows()
    if data.prompts:
        _mix_texts(data, model, processor, DistillingCollator(collate), saved)
    checkpoint = last_checkpoint(options.output) if resume else None
    if resume:
        say("No checkpoint found: training starts." if checkpoint is None else f"Continuing from {checkpoint}")
    before = 0 if checkpoint is None else step_of(checkpoint)
    arguments = _arguments(options, data, half)
    if checkpoint is None:
        reads = processor if features is None else features.reader(processor)
        saved[START] = start(model, reads, data.to_align(collate), arguments.device, data.aligned is not None)
        if is_first_process():
            write_options(options.output, saved)
    rates = rates_of(saved[START], options)
    arguments.learning_rate = rates.learning_rate
    finished = before >= arguments.max_steps
    if finished:  # `Trainer` would take one more step
        _load_weights(model, checkpoint, **hub)
    elif checkpoint is not None and not (checkpoint / SHARDS).is_dir():
        # An error if weights are missing, where `Trainer` only warns. A checkpoint has trained weights in float32.
        type(model).from_pretrained(checkpoint, device_map="meta", dtype=torch.float32, **hub)
    reader = data.reader(collate)
    compared: Any = Places(data.rows if data.others is None else data.others)
    use = PictureUseCallback(compared, reader, max(2, options.batch_size))
    trainer = _make_trainer(model, arguments, data, reader, processor, use, rates.started_rate)
    if finished:
        say(f"no steps left to train after step {before}")
        trainer.state = TrainerState.load_from_json(f"{checkpoint}/{STATE}")  # for the model card
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if use.last is not None and use.last.uses:  # otherwise the callback has warned
        say(f"{use.last}{'' if data.others is not None else ', which are trained on'}")
    if data.others is not None:
        say(f"evaluation loss {_last_evaluation(trainer):.4f}")
    _save(model, processor, trainer, options, dtypes)
    if is_first_process():
        write_model_card(model, options.output, trainer, training=_facts(options, data, use.last, saved[START], rates))
        write_options(options.output, {**saved, "complete": True})
        say(f"saved to {options.output}")
        if bad := data.bad_rows().count():
            say(f"{bad} bad row(s) were left out: {options.output / BAD_ROWS_FILE} has the reasons")
        if not finished:
            say(_last_loss(trainer.state.log_history, before, options.log_steps))


def _mix_texts(
    data: RunData,
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    collate: DistillingCollator,
    saved: dict[str, Any],
) -> None:
    """Mixes text prompts with answers of the text model into the rows of the run.

    A hash of the answers is saved with the options. Raises a `ValueError` if a resumed run finds other answers.
    """
    output = data.options.output
    # Making these arguments joins the processes and chooses a device. The arguments of the run itself are made later,
    # because they need the number of rows.
    device = TrainingArguments(str(output / CHECKPOINTS), use_cpu=_on_cpu(data.options)).device
    texts = text_rows(model, processor, data.prompts, collate, data.some_picture(collate), output, device)
    digest = digest_of_rows(texts)
    if saved.setdefault(KEPT, digest) != digest:
        raise ValueError(
            f"`--resume`: expected the text answers of the run in {output}, got others in {KEPT_TEXT_FILE}, so that it "
            "would train on other rows. Put the file back, or start in a new folder."
        )
    data.mix(texts)
    if is_first_process():
        write_options(output, saved)


def _load_model(options: TrainingOptions, features: VisionFeatures | None, **hub: Any) -> XAttnForConditionalGeneration:
    model = XAttnForConditionalGeneration.from_pretrained(options.model, dtype=options.dtype, **hub)
    if model.dtype == torch.float16:
        raise ValueError(
            f"Expected weights in float32 or bfloat16, got {options.model} in float16, in which gradients vanish. Add "
            "`--dtype bfloat16` or `--dtype float32`."
        )
    if model.dtype == torch.bfloat16 and _on_cpu(options) and not multiplies_natively(torch.bfloat16):
        say(SLOW_HALF)
    if features is not None:
        features.check_tower(model)
    if options.adapter_only:
        check_bases(model)
    return model


def _make_trainer(
    model: XAttnForConditionalGeneration,
    arguments: TrainingArguments,
    data: RunData,
    reader: RowReader,
    processor: XAttnProcessor,
    use: PictureUseCallback,
    started_rate: float,
) -> Trainer:
    # A checkpoint holds a tied weight only once. When `Trainer` reads it, it ties the names that are listed here again,
    # and warns of any other name that is missing.
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
    callbacks: list[TrainerCallback] = [_CountsEpochs(data), use]
    if data.options.bad_rows == SKIP:
        callbacks.append(StopsAtLimit(data.bad_rows(), data.total))
    return RunTrainer(
        started_rate=started_rate,
        distill_text=data.options.weight_of_text,
        rows_of_a_step=data.rows_of_a_step,
        model=model,
        args=arguments,
        train_dataset=data.in_order(),
        eval_dataset=data.held_out(),
        data_collator=reader,
        processing_class=processor,
        callbacks=callbacks,
    )


def _last_evaluation(trainer: Trainer) -> float:
    """Returns the evaluation loss after the last step, from the log or computed now."""
    last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), {"step": -1})
    if last["step"] != trainer.state.global_step:
        last = trainer.evaluate()
    return last["eval_loss"]


class _CountsEpochs(TrainerCallback):
    """Sets the epoch that a step is in. For `Trainer` itself, a run is a single pass through all its rows.

    It also makes `Trainer` log after the last step, because `Trainer` averages a loss over processes only when it logs.
    """

    def __init__(self, data: RunData):
        self.rows_of_a_step, self.epoch_rows = data.rows_of_a_step, data.epoch_rows

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step * self.rows_of_a_step / self.epoch_rows
        control.should_log |= state.global_step >= state.max_steps


def _last_loss(history: list[dict[str, Any]], before: int, steps: int) -> str:
    """Describes the mean loss of the last `steps` steps or a few more, without the `before` steps of an earlier run."""
    # Each entry of the log holds the mean loss since the entry before.
    logged = [entry for entry in history if "loss" in entry and entry["step"] > before]
    starts = [before, *(entry["step"] for entry in logged)]
    total, start, end = 0.0, starts[-1], starts[-1]
    for start, entry in reversed(list(zip(starts, logged))):
        total += (entry["step"] - start) * entry["loss"]
        if end - start >= steps:
            break
    return f"training loss {total / (end - start):.4f} (mean of the steps {start + 1} to {end})"


def _facts(options: TrainingOptions, data: RunData, use: PictureUse | None, start: str, rates: Rates) -> dict[str, str]:
    """Returns what the model card says about the run in addition to what `Trainer` knows."""
    facts = {"examples": f"{len(data.rows):,} of {data.named()}", "prompt for captions": data.rows.prompt}
    if data.texts:
        facts["text prompts beside an image"] = f"{100 * options.share_of_text:g} % of rows"
    if options.weight_of_text is not None:
        facts["weight of KL to the text model, for texts beside an image"] = f"{options.weight_of_text:g}"
    if rates.started_rate != 1.0:
        facts["share of the learning rate for weights that do not start at zero"] = f"{rates.started_rate:g}"
    facts["connector and blocks start"] = start
    if use is not None:
        of = "trained rows" if data.others is None else "rows that were not trained on"
        facts[f"loss of {of}, with their image"] = f"{use.own:.3f}"
        facts[f"loss of {of}, with the image of another row"] = f"{use.another:.3f}"
    return facts


def _load_weights(model: XAttnForConditionalGeneration, checkpoint: Any, **hub: Any) -> None:
    """Loads the weights of a checkpoint into the model, which keeps its dtypes."""
    from torch.distributed import checkpoint as sharded

    shards = checkpoint / SHARDS
    if shards.is_dir():  # `load` fills the tensors of the model; each process reads all of them
        sharded.load({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
    else:
        last = type(model).from_pretrained(str(checkpoint), dtype=torch.float32, **hub)
        model.load_state_dict(last.state_dict())


def _processor(name: str, **hub: Any) -> XAttnProcessor:
    """Returns the processor of a model as an [`XAttnProcessor`], after a check of its chat template."""
    config = AutoConfig.from_pretrained(name, **hub)
    if config.vision_config is None:
        raise ValueError(
            f"Expected a model with a vision tower, because the data hold images, got {name}, which has none. "
            "Retrofit its text model with `--vision`, or train on features in Python (`cross_attention_states`)."
        )
    try:
        processor = AutoProcessor.from_pretrained(name, **hub)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} was saved without a processor: save an `XAttnProcessor` into its folder.") from error
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{name} was saved without an image processor: save an `XAttnProcessor` into its folder.")
    if not isinstance(processor, XAttnProcessor):  # an imported model has a processor of another class
        marker = config.image_token_id
        token = None if marker is None else processor.tokenizer.convert_ids_to_tokens(marker)
        template = processor.chat_template or processor.tokenizer.chat_template
        processor = XAttnProcessor(processor.image_processor, processor.tokenizer, template, image_token=token)
    check_template(processor)
    return processor


def _prepare(model: XAttnForConditionalGeneration, options: TrainingOptions) -> dict[str, torch.dtype]:
    """Freezes what does not train, and converts the rest to float32. Returns the dtypes of the rest before that."""
    if options.train_text:
        check_trainable("the text model (`--train-text`)", model.model.text_model, "Train an adapter (LoRA) on it.")
    freeze(model, text=not options.train_text, vision=not options.train_vision)
    if options.started_rate is not None:
        check_started_rate(model, options.started_rate)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    train_in_float32(model)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    say(f"{trainable:,} of {model.num_parameters():,} parameters train")
    return dtypes


def _arguments(options: TrainingOptions, data: RunData, half: bool) -> TrainingArguments:
    steps, an_epoch = data.steps(), data.steps_of_an_epoch()
    return TrainingArguments(
        output_dir=str(options.output / CHECKPOINTS),
        max_steps=steps,
        train_sampling_strategy="sequential",  # `RunData.in_order` has shuffled the rows already
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.gradient_accumulation,
        lr_scheduler_type="cosine",
        warmup_steps=min(math.ceil(options.warmup * steps), steps - 1),  # the first warm-up step has a rate of 0
        weight_decay=options.weight_decay,
        eval_strategy="no" if data.others is None else "steps",
        eval_steps=min(options.eval_steps or an_epoch, steps),
        save_strategy="steps",
        save_steps=options.save_steps or max(1, steps // 10),
        save_total_limit=2,
        logging_steps=min(options.log_steps, steps),
        logging_nan_inf_filter=False,  # the filter would hide a loss that is not finite
        seed=options.seed,
        # Without a GPU, `TrainingArguments` refuses bfloat16 unless the CPU was asked for.
        use_cpu=_on_cpu(options),
        bf16=half,  # compute in bfloat16 if the frozen weights are bfloat16; trained weights stay float32
        dataloader_num_workers=options.workers,
        prediction_loss_only=True,
        remove_unused_columns=False,
        report_to=options.report_to or "none",
    )


def _end_with_the_turn(model: XAttnForConditionalGeneration, processor: XAttnProcessor) -> None:
    """Makes `generate` also stop at the token with which the chat template ends a turn, because the model learns it."""
    generation = model.generation_config
    before, ends = generation.eos_token_id, ends_of_turns(generation, processor)
    if ends and ends not in (before, [before]):
        generation.eos_token_id = ends
        say(f"`generate` ends at token {ends[-1]}, too: the chat template ends a turn with it")


def _on_cpu(options: TrainingOptions) -> bool:
    return options.device == "cpu" or not torch.accelerator.is_available()


def _save(
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    trainer: Trainer,
    options: TrainingOptions,
    dtypes: dict[str, torch.dtype],
) -> None:
    """Saves the model in the dtypes in which it was loaded.

    All processes must call this, because each may hold a part of the weights.
    """
    weights: dict[str, Any] = {}
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        weights["state_dict"] = {name: weight.to(dtypes.get(name, weight.dtype)) for name, weight in gathered.items()}
        # Gathered weights are copies. The names of a tied weight must share one tensor again, or each would be saved.
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            name = name.replace(f"{WRAPPED}.", "")
            if name in gathered and first.setdefault(id(parameter), name) != name:
                weights["state_dict"][name] = weights["state_dict"][first[id(parameter)]]
    # Parameters of a sharded model change, too, because configuration and card read their dtype.
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name.replace(f"{WRAPPED}.", ""))
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
    if is_first_process():
        processor.save_pretrained(options.output)
    model.save_pretrained(
        options.output, is_main_process=is_first_process(), adapter_only=options.adapter_only, **weights
    )
