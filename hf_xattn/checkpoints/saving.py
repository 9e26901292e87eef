"""What the models of this package add to `save_pretrained` and `push_to_hub`.

transformers saves all weights of a model, under the names that they have in memory. Here the weights get the names that
they have in the checkpoints of the text model and the vision tower, `adapter_only=True` saves only what was added, a
model card is written, and `with_code=True` adds the code of this package. Each save is written whole or not at all.
"""

from __future__ import annotations

import functools
import glob
import inspect
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import hub, logging

from ..utils.checkpoint_files import CARD, SHARDS, SHARDS_OF_RANKS
from ..utils.custom_code import save_code, save_parts_code
from ..utils.distributed import gathered_weights, is_distributed, is_sharded_by_transformers
from ..utils.keywords import refuse_unknown
from ..utils.stub import PACKAGE, own_code, write_stub
from ..utils.tensor_checks import first_quantized
from ..utils.transformers_api import is_blank_card
from ..utils.whole_folder import whole_folder
from .adapters import check_bases, save_small
from .folders import MANIFEST, check_adapter_target, check_target, weight_files_of
from .own_parts import SAVE_OR_MERGE, refuse_adapter_layers, refuse_own_parts, warn_of_weights_left_out
from .quantization import check_requantizable
from .saved_names import rules_of_parts


if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from transformers import PreTrainedModel as Model  # the base class of the models that use the mixin
else:
    Model = object

logger = logging.get_logger(__name__)

# Keywords of `save_pretrained` that `adapter_only=True` knows. All others are refused: transformers would ignore them.
SAVE_KEYWORDS = frozenset(
    "is_main_process state_dict push_to_hub max_shard_size variant token save_peft_format save_original_format "
    "distributed_checkpoint".split()
)


class XAttnSavingMixin(Model):
    """The methods of both models that save."""

    _saved_as: str | None = None

    @property
    def _weight_conversions(self) -> Any:
        """The rules that transformers reverses to save the weights."""
        return rules_of_parts(self)

    @_weight_conversions.setter
    def _weight_conversions(self, used: Any) -> None:
        """Ignores the rules that `from_pretrained` sets: a model is always saved under the same names."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args,
        adapter_only: bool = False,
        text_base: str | os.PathLike[str] | None = None,
        vision_base: str | os.PathLike[str] | None = None,
        with_code: bool = False,
        **kwargs,
    ) -> None:
        """Saves the model, as `PreTrainedModel.save_pretrained` does, and writes a model card.

        The weights of the text model and the vision tower get the names that they have in their own checkpoints. If
        the code of one of them came with its checkpoint, it is saved too, and the model loads with
        `trust_remote_code=True`. A model card that a person wrote or changed is kept.

        After `add_adapter`, the adapter alone is saved, as for any model of transformers. A warning names other weights
        that train. If several processes hold parts of the weights (FSDP2), all of them must call this method.

        Args:
            adapter_only (`bool`, defaults to `False`): save only what the bases do not hold: the blocks, the connector,
                the added vocabulary, and all weights that differ from those of the bases. To compare them, the bases
                are loaded again. `from_pretrained` of the folder loads the bases, too.
            text_base, vision_base (`str` or `Path`, *optional*): with `adapter_only`, Hub id or folder of the bases. By
                default the checkpoints that the parts were loaded from.
            with_code (`bool`, defaults to `False`): also save the code of this package, for machines without it, and
                the files of connectors and gates of your own.

        Raises:
            ValueError: before anything is written. For a folder that is a file, or that holds something that would be
                loaded in place of the save. For a model with layers of a `PeftModel`, with a part of a class of your
                own, or with settings that were changed after it was built. With `adapter_only`, for a base without a
                name or without a checkpoint.

        Example:

        ```python
        >>> from hf_xattn import XAttnForConditionalGeneration, retrofit

        >>> model = retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
        >>> model.save_pretrained("small", adapter_only=True)  # blocks and connector, without the two bases
        >>> model = XAttnForConditionalGeneration.from_pretrained("small")
        ```
        """
        body: Any = self.base_model
        body._check_inserted()
        if not self._saves_peft_adapter():
            refuse_own_parts(self)
        is_main_process = self.should_save_on_this_rank(is_main_process)
        target = Path(save_directory)
        bases = {"text_base": text_base, "vision_base": vision_base}
        if adapter_only:
            if args:
                raise ValueError(f"With `adapter_only=True` pass other arguments by name, got {args!r}.")
            self._save_adapter(target, is_main_process, bases, with_code, kwargs)
        else:
            _refuse_bases(text_base, vision_base)
            saved: Any = super()
            names = list(inspect.signature(saved.save_pretrained).parameters)[2:]
            self._save_whole(target, is_main_process, with_code, dict(zip(names, args), **kwargs))

    def push_to_hub(  # type: ignore[override]  # transformers' decorator hides its own signature
        self,
        repo_id: str,
        *,
        adapter_only: bool = False,
        text_base: str | None = None,
        vision_base: str | None = None,
        with_code: bool = False,
        max_shard_size: int | str = "50GB",
        **kwargs,
    ) -> CommitInfo:
        """Saves the model and uploads it, as `PreTrainedModel.push_to_hub` does.

        `adapter_only`, `text_base`, `vision_base` and `with_code` are as in [`save_pretrained`].

        Raises:
            ValueError: as [`save_pretrained`]. With `adapter_only`, also for a base that is a folder, which nobody else
                could load.
        """
        options: dict[str, Any] = {"with_code": with_code}
        if adapter_only:
            for name, source in check_bases(self, {"text_base": text_base, "vision_base": vision_base}).items():
                if os.path.isdir(source.name):
                    raise ValueError(
                        f"`push_to_hub(adapter_only=True)`: nobody else finds the base of the {name}, a folder of this "
                        f"machine ({source.name}). Push it first, and pass its Hub id as `text_base` or `vision_base`."
                    )
            options.update(adapter_only=True, text_base=text_base, vision_base=vision_base)
        else:
            _refuse_bases(text_base, vision_base)
        before, is_unnamed = self.name_or_path, self._takes_name_of_folder()
        private = kwargs.pop("private", None)
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.save_pretrained(folder, max_shard_size=max_shard_size, **options)
                made = hub.hf_api().create_repo(repo_id, private=private, token=kwargs.get("token"), exist_ok=True)
                repo_id = made.repo_id
                result = self._upload(folder, {}, repo_id, **kwargs)
            before = before or repo_id
            return result
        finally:
            if is_unnamed:  # the temporary folder, which has given the model its name, is gone
                self.name_or_path = self.config.name_or_path = before
                self._saved_as = before or None

    def _save_adapter(
        self, target: Path, is_main_process: bool, bases: dict[str, Any], with_code: bool, options: dict[str, Any]
    ) -> None:
        refuse_unknown(self.save_pretrained, options, SAVE_KEYWORDS)
        if options.pop("push_to_hub", False):
            raise ValueError(
                "`adapter_only=True` excludes `push_to_hub=True`. Call `model.push_to_hub(repo_id, adapter_only=True)`."
            )
        for name in ("variant", "distributed_checkpoint", "save_original_format"):
            if options.get(name):
                raise ValueError(f"`adapter_only=True` does not work together with `{name}`, got {options[name]!r}.")
        state_dict = options.pop("state_dict", None)
        if state_dict is None:
            state_dict = gathered_weights(self)
        is_unnamed = self._takes_name_of_folder()
        if is_main_process:
            save_small(self, target, bases, with_code, state_dict, options)
        if is_unnamed:
            self._take_name(target)

    def _save_whole(self, target: Path, is_main_process: bool, with_code: bool, options: dict[str, Any]) -> None:
        given = options.get("state_dict")
        if self._saves_peft_adapter():
            check_adapter_target(target, self.name_or_path)
            warn_of_weights_left_out(self)
            if with_code:
                raise ValueError(
                    "`with_code=True`: an adapter (PEFT) is saved alone. Save the code with the model below it."
                )
        else:
            check_target(target, adapter_only=False)
            refuse_adapter_layers(self.base_model, "`save_pretrained` cannot save", SAVE_OR_MERGE)
            check_requantizable(self)
            if given and first_quantized(self.base_model) is not None:
                raise ValueError(
                    "Expected no `state_dict` for a quantized model, whose own weights are saved. Leave it out."
                )
            if given is None and not is_sharded_by_transformers(self):
                options = {**options, "state_dict": gathered_weights(self)}
        is_unnamed = self._takes_name_of_folder()
        if options.get("distributed_checkpoint"):  # all processes write into the folder
            earlier = [] if self._saves_peft_adapter() else list(_earlier_save(target, options.get("variant")))
            self._write(target, with_code, options, target, is_main_process)
            if is_main_process:
                _remove_weights(earlier)
            if is_distributed():
                torch.distributed.barrier()  # after it, the other processes may load what was saved
        elif not is_main_process:  # all processes must call transformers, but only the main process writes
            with tempfile.TemporaryDirectory() as nothing:
                self._write(Path(nothing), with_code, {**options, "push_to_hub": False}, target, False)
            self._wait_for_all()
        else:
            self._save_and_push(target, with_code, options)
        if is_unnamed:
            self._take_name(target)

    def _save_and_push(self, target: Path, with_code: bool, options: dict[str, Any]) -> None:
        """Saves in one process, and then uploads. If the upload fails, the saved folder is complete all the same."""
        stale = functools.partial(_earlier_save, variant=options.get("variant"))
        with whole_folder(target, _earlier_peft_adapter if self._saves_peft_adapter() else stale) as fresh:
            if (target / CARD).is_file():  # written anew only if no person has changed it
                shutil.copy2(target / CARD, fresh / CARD)
            self._write(fresh, with_code, {**options, "push_to_hub": False}, target)
            new = set(os.listdir(fresh))
        self._wait_for_all()
        if options.get("push_to_hub"):
            push = {name: value for name, value in options.items() if name not in SAVE_KEYWORDS or name == "token"}
            commit = {name: push.pop(name) for name in ("commit_message", "create_pr") if name in push}
            # If the folder is a link, the repository gets the name of the link, not of its target.
            repo_id = push.pop("repo_id", os.path.basename(os.path.abspath(target)))
            repo_id = hub.hf_api().create_repo(repo_id, exist_ok=True, **push).repo_id
            others = {name: math.inf for name in os.listdir(target) if name not in new}
            self._upload(target, others, repo_id, token=push.get("token"), **commit)

    def _write(
        self,
        folder: Path,
        with_code: bool,
        options: dict[str, Any],
        target: Path,
        is_main_process: bool = True,
    ) -> None:
        is_whole = is_main_process and not self._saves_peft_adapter()
        if is_whole:
            body: Any = self.base_model
            config = self.config
            parts = ((body.text_model, config.text_config), (body.vision_tower, config.vision_config))
            save_code([(part, own) for part, own in parts if part is not None and own is not None], folder)
            save_parts_code(config, folder, with_code)
            write_stub(folder, with_code, target)
        saved: Any = super()
        saved.save_pretrained(folder, is_main_process, **options)
        if is_whole:
            self._renew_card(folder)

    def _renew_card(self, folder: str | os.PathLike[str]) -> None:
        if PACKAGE == "hf_xattn":  # otherwise the code came with a folder, which has no module for the card
            from .model_card import write_model_card

            write_model_card(self, folder)

    def _is_edited(self, path: Path, other: str) -> bool:
        """Whether a person wrote or changed a card, which is another one than that of the repository."""
        if PACKAGE != "hf_xattn" or not path.is_file():
            return False
        from .model_card import is_edited

        text = path.read_text(encoding="utf-8", errors="replace")
        return text != other and is_edited(text)

    def barrier_after_gathered_checkpoint_save(self, *args, **kwargs) -> None:
        """Does nothing. transformers calls this when its files are written, but they are not in their places yet."""

    def _wait_for_all(self) -> None:
        """Waits for all processes. After this call, they may load what was saved."""
        waiting: Any = super()
        waiting.barrier_after_gathered_checkpoint_save(getattr(self.config, "distributed_config", None))

    def _upload(
        self, folder: str | os.PathLike[str], known: dict[str, float], repo_id: str, tags: Any = None, **commit: Any
    ) -> Any:
        """Uploads the new files of a folder. If the repository has a model card, that card is kept.

        If a person wrote or changed the card in the folder, too, both cards stay as they are.

        Args:
            known: files that are not new, with their times.
            commit: keyword arguments of `push_to_hub` about the commit.
        """
        tags = list(dict.fromkeys([*(self.model_tags or []), *([tags] if isinstance(tags, str) else tags or [])]))
        card = hub.create_and_tag_model_card(repo_id, tags or None, token=commit.get("token"))
        path = Path(folder) / CARD
        if not is_blank_card(str(card)):
            if self._is_edited(path, str(card)):
                known = {**known, CARD: math.inf}
                logger.warning(f"The repository {repo_id} keeps its own model card: {path} was not uploaded.")
            else:
                card.save(path)
        elif not path.is_file():
            self._renew_card(folder)
        return self._upload_modified_files(folder, repo_id, known, **commit)

    def _saves_peft_adapter(self) -> bool:
        return getattr(self, "_hf_peft_config_loaded", False)

    def _takes_name_of_folder(self) -> bool:
        """Whether the model has no name yet, and is named after the folder: PEFT records the name of its base."""
        return self.name_or_path in ("", self._saved_as) and not self._saves_peft_adapter()

    def _take_name(self, folder: Path) -> None:
        self.name_or_path = self.config.name_or_path = self._saved_as = os.fspath(folder)


def _refuse_bases(text_base: Any, vision_base: Any) -> None:
    for name, base in (("text_base", text_base), ("vision_base", vision_base)):
        if base is not None:
            raise ValueError(f"`{name}` needs `adapter_only=True`, got {base!r}.")


def _earlier_save(folder: Path, variant: str | None) -> Iterator[Path]:
    """Yields the files of an earlier save that must go: weights that `from_pretrained` would load first, a manifest,
    and code.
    """
    suffix = "" if variant is None else f".{glob.escape(variant)}"
    for shards in ("", SHARDS):
        yield from folder.glob(f"model{suffix}{shards}.safetensors")
    yield from folder.glob(f"model.safetensors.index{suffix}.json")
    yield from folder.glob(SHARDS_OF_RANKS)
    if (folder / MANIFEST).is_file():
        yield folder / MANIFEST
        yield from weight_files_of(folder)
    yield from own_code(folder)


def _remove_weights(stale: list[Path]) -> None:
    """Removes the weights of an earlier save, except those that this save by all processes has written again."""
    written = torch.distributed.get_world_size() if is_distributed() else 1
    for path in stale:
        of_rank = path.match(SHARDS_OF_RANKS) and int(path.name.split("-")[1]) <= written  # counted from 1
        if path.suffix != ".py" and not of_rank:
            path.unlink(missing_ok=True)


def _earlier_peft_adapter(folder: Path) -> Iterator[Path]:
    for shards in ("", SHARDS):
        yield from folder.glob(f"adapter_model{shards}.safetensors")
