"""The training run of `hf-xattn train`: from rows with images to a folder with the trained model.

A run that was killed continues from the last complete checkpoint, with the same data and the same options, which are
saved beside the checkpoints. If there are several processes, each trains on its share of the rows of a step, and the
first one prints and writes files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from ..checkpoints.adapters import check_bases
from ..checkpoints.model_card import write_model_card
from ..learning.activation_wrappers import WRAPPED
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing.chat_templates import check_template
from ..processing_xattn import XAttnProcessor
from ..utils.projection import multiplies_natively
from .answer_spans import ends_of_turns
from .bad_rows import BAD_ROWS_FILE, Places
from .collator import XAttnDataCollator
from .freezing import freeze, train_in_float32
from .kept_text import KEPT_TEXT_FILE, DistillingCollator, digest_of_rows, text_rows
from .launch import is_first_process, num_processes, say
from .picture_use import PictureUseCallback
from .run_data import RunData
from .run_folder import CHECKPOINTS, KEPT, START, check_resumed, last_checkpoint, step_of, write_options
from .run_start import rates_of, start
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
    run = _Run(options, resume)
    run.write_options()
    if is_first_process():
        run.data.write_bad_rows()
    if run.data.prompts:
        run.mix_texts()
    checkpoint = last_checkpoint(options.output) if resume else None
    if resume:
        say("No checkpoint found: training starts." if checkpoint is None else f"Continuing from {checkpoint}")
    before = 0 if checkpoint is None else step_of(checkpoint)
    trainer = run.trainer(checkpoint)
    # After the last step, this only loads the checkpoint.
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if run.use.last is not None and run.use.last.uses:  # otherwise the callback has warned
        say(f"{run.use.last}{'' if run.data.others is not None else ', which are trained on'}")
    if run.data.others is not None:
        say(f"evaluation loss {_last_evaluation(trainer):.4f}")
    run.save(trainer)
    say(f"saved to {options.output}")
    if bad := run.data.bad_rows().count():
        say(f"{bad} bad row(s) were left out: {options.output / BAD_ROWS_FILE} has the reasons")
    if trainer.state.global_step == before:
        say(f"no steps left to train after step {before}")
    else:
        say(_last_loss(trainer.state.log_history, before, options.log_steps))


class _Run:
    """A run: its options, its data and its model. The constructor checks the data, and then loads the model."""

    def __init__(self, options: TrainingOptions, resume: bool):
        self.options, self.data = options, RunData(options)
        self.saved = options.saved(self.data.fingerprints())
        earlier = check_resumed(options.output, self.saved) if resume else {}
        self.saved |= {name: earlier[name] for name in (KEPT, START) if name in earlier}
        self.hub: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
        self.on_cpu = options.device == "cpu" or not torch.accelerator.is_available()
        self.processor = _processor(options.model, **self.hub)
        self.features = None if options.features is None else VisionFeatures.before_weights(options.features)
        self.collate = XAttnDataCollator(
            self.processor, max_length=options.max_length, padding_side="right", features=self.features
        )
        self.data.check(self.collate)
        self.data.say()
        if num_processes() > 1:
            say(f"{num_processes()} processes, each with {options.batch_size} examples per forward pass")
        set_seed(options.seed)
        self.model = self._load_model()
        self.half = self.model.dtype == torch.bfloat16
        _end_with_the_turn(self.model, self.processor)
        self.dtypes = _prepare(self.model, options)
        compared: Any = Places(self.data.rows if self.data.others is None else self.data.others)
        self.reader = self.data.reader(self.collate)
        self.use = PictureUseCallback(compared, self.reader, max(2, options.batch_size))

    def _load_model(self) -> XAttnForConditionalGeneration:
        options = self.options
        model = XAttnForConditionalGeneration.from_pretrained(options.model, dtype=options.dtype, **self.hub)
        if model.dtype == torch.float16:
            raise ValueError(
                f"Expected weights in float32 or bfloat16, got {options.model} in float16, in which gradients vanish. "
                "Add `--dtype bfloat16` or `--dtype float32`."
            )
        if model.dtype == torch.bfloat16 and self.on_cpu and not multiplies_natively(torch.bfloat16):
            say(SLOW_HALF)
        if self.features is not None:
            self.features.check_tower(model)
        if options.adapter_only:
            check_bases(model)
        return model

    def write_options(self, **more: Any) -> None:
        if is_first_process():
            write_options(self.options.output, {**self.saved, **more})

    def mix_texts(self) -> None:
        """Mixes text prompts with answers of the text model into the rows of the run.

        A hash of the answers is saved with the options. Raises a `ValueError` if a resumed run finds other answers.
        """
        output, collate = self.options.output, DistillingCollator(self.collate)
        # Making these arguments joins the processes and chooses a device. The arguments of the run itself are made
        # later, because they need the number of rows.
        device = TrainingArguments(str(output / CHECKPOINTS), use_cpu=self.on_cpu).device
        picture = self.data.some_picture(collate)
        texts = text_rows(self.model, self.processor, self.data.prompts, collate, picture, output, device)
        digest = digest_of_rows(texts)
        if self.saved.setdefault(KEPT, digest) != digest:
            raise ValueError(
                f"`--resume`: expected the text answers of the run in {output}, got others in {KEPT_TEXT_FILE}, so "
                "that it would train on other rows. Put the file back, or start in a new folder."
            )
        self.data.mix(texts)
        self.write_options()

    def trainer(self, checkpoint: Path | None) -> Trainer:
        """Gives a fresh model its start, or checks the checkpoint to continue from, and returns the `Trainer`."""
        model, options, arguments = self.model, self.options, self._arguments()
        if checkpoint is None:
            reads = self.processor if self.features is None else self.features.reader(self.processor)
            rows, asked = self.data.to_align(self.collate), self.data.aligned is not None
            self.saved[START] = start(model, reads, rows, arguments.device, asked)
            self.write_options()
        elif not (checkpoint / SHARDS).is_dir():
            # An error if weights are missing, where `Trainer` only warns. A checkpoint has trained weights in float32.
            type(model).from_pretrained(checkpoint, device_map="meta", dtype=torch.float32, **self.hub)
        self.rates = rates_of(self.saved[START], options)
        arguments.learning_rate = self.rates.learning_rate
        # A checkpoint holds a tied weight only once. When `Trainer` reads it, it ties the names that are listed here
        # again, and warns of any other name that is missing.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
        return RunTrainer(
            started_rate=self.rates.started_rate,
            distill_text=options.weight_of_text,
            rows_of_a_step=self.data.rows_of_a_step,
            model=model,
            args=arguments,
            train_dataset=self.data.in_order(),
            eval_dataset=self.data.held_out(),
            data_collator=self.reader,
            processing_class=self.processor,
            callbacks=[_AfterEachStep(self.data), self.use],
        )

    def _arguments(self) -> TrainingArguments:
        options, data = self.options, self.data
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
            use_cpu=self.on_cpu,
            bf16=self.half,  # compute in bfloat16 if the frozen weights are bfloat16; trained weights stay float32
            dataloader_num_workers=options.workers,
            prediction_loss_only=True,
            remove_unused_columns=False,
            report_to=options.report_to or "none",
        )

    def save(self, trainer: Trainer) -> None:
        """Saves the model in the dtypes in which it was loaded, with its processor, its card and the options.

        All processes must call this, because each may hold a part of the weights.
        """
        model, output, dtypes = self.model, self.options.output, self.dtypes
        weights: dict[str, Any] = {}
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped)
            weights = {name: weight.to(dtypes.get(name, weight.dtype)) for name, weight in gathered.items()}
            # Gathered weights are copies. The names of a tied weight must share one tensor again, or each would be
            # saved.
            first: dict[int, str] = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                name = name.replace(f"{WRAPPED}.", "")
                if name in gathered and first.setdefault(id(parameter), name) != name:
                    weights[name] = weights[first[id(parameter)]]
            weights = {"state_dict": weights}
        # Parameters of a sharded model change, too, because configuration and card read their dtype.
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes.get(name.replace(f"{WRAPPED}.", ""), parameter.dtype))
        if is_first_process():
            self.processor.save_pretrained(output)
        adapter_only = self.options.adapter_only
        model.save_pretrained(output, is_main_process=is_first_process(), adapter_only=adapter_only, **weights)
        if is_first_process():
            write_model_card(model, output, trainer, training=self._facts())
        self.write_options(complete=True)

    def _facts(self) -> dict[str, str]:
        """Returns what the model card says about the run in addition to what `Trainer` knows."""
        options, data, use, rates = self.options, self.data, self.use.last, self.rates
        facts = {"examples": f"{len(data.rows):,} of {data.named()}", "prompt for captions": data.rows.prompt}
        if data.mixed is not data.rows:
            facts["text prompts beside an image"] = f"{100 * options.share_of_text:g} % of rows"
        if options.weight_of_text is not None:
            facts["weight of KL to the text model, for texts beside an image"] = f"{options.weight_of_text:g}"
        if rates.started_rate != 1.0:
            facts["share of the learning rate for weights that do not start at zero"] = f"{rates.started_rate:g}"
        facts["connector and blocks start"] = self.saved[START]
        if use is not None:
            of = "trained rows" if data.others is None else "rows that were not trained on"
            facts[f"loss of {of}, with their image"] = f"{use.own:.3f}"
            facts[f"loss of {of}, with the image of another row"] = f"{use.another:.3f}"
        return facts


def _last_evaluation(trainer: Trainer) -> float:
    """Returns the evaluation loss after the last step, from the log or computed now."""
    last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), {"step": -1})
    if last["step"] != trainer.state.global_step:
        last = trainer.evaluate()
    return last["eval_loss"]


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


class _AfterEachStep(TrainerCallback):
    """Sets the epoch that a step is in, and ends a run with more bad rows than `--bad-rows-limit` allows.

    For `Trainer` itself, a run is a single pass through all its rows. `Trainer` averages a loss over processes only
    when it logs, so it is made to log after the last step.
    """

    def __init__(self, data: RunData):
        self.rows_of_a_step, self.epoch_rows, self.total = data.rows_of_a_step, data.epoch_rows, data.total
        self.bad_rows = data.bad_rows() if data.options.bad_rows == SKIP else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step * self.rows_of_a_step / self.epoch_rows
        control.should_log |= state.global_step >= state.max_steps
        if self.bad_rows is not None:
            self.bad_rows.check(self.total)


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
    freeze(model, text=not options.train_text, vision=not options.train_vision)
    if options.started_rate is not None:
        check_started_rate(model, options.started_rate)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    train_in_float32(model)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    say(f"{trainable:,} of {model.num_parameters():,} parameters train")
    return dtypes


def _end_with_the_turn(model: XAttnForConditionalGeneration, processor: XAttnProcessor) -> None:
    """Makes `generate` also stop at the token with which the chat template ends a turn, because the model learns it."""
    generation = model.generation_config
    before, ends = generation.eos_token_id, ends_of_turns(generation, processor)
    if ends and ends not in (before, [before]):
        generation.eos_token_id = ends
        say(f"`generate` ends at token {ends[-1]}, too: the chat template ends a turn with it")
