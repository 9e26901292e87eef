"""The model class that vLLM runs: a decoder of vLLM with blocks of this package, its vision tower and its connector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import init_vllm_registered_model
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..checkpoints.saved_names import named_as_in_memory
from ..configuration_xattn import XAttnConfig
from ..images.connector import XAttnConnector
from ..images.image_encoder import ImageEncoder
from ..images.tower import build_tower
from ..parts.tiles import Tiles
from ..processing_xattn import TILE_INPUTS
from ..utils.architectures import TILED_VISION_TYPES
from .block import STEP, Block
from .decoders import block_weight, insert, weights_of_folder, with_additional
from .engine import repair_order
from .image_features import DEFAULT_BYTES, OPTION, ImageFeatures
from .mllama import as_saved, is_mllama
from .requests import XAttnDummyInputs, XAttnMultiModalProcessor, XAttnProcessingInfo
from .served import DECODERS, check_served
from .steps import Images, read_step, read_step_with_images, with_real


if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors


@MULTIMODAL_REGISTRY.register_processor(
    XAttnMultiModalProcessor, info=XAttnProcessingInfo, dummy_inputs=XAttnDummyInputs
)
class XAttnForVLLM(nn.Module, SupportsMultiModal):
    """[`XAttnForConditionalGeneration`] on vLLM."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return None  # The chat template of the model writes the markers.

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        repair_order()
        config: XAttnConfig = vllm_config.model_config.hf_config
        check_served(config)
        self.config = config
        self.source = (vllm_config.model_config.model, vllm_config.model_config.revision)
        self.served = DECODERS[config.text_config.model_type]
        assert config.vision_config is not None
        self.vision_tower = build_tower(config.vision_config).eval()
        self.connector = XAttnConnector(config).eval()
        self.image_encoder = ImageEncoder(
            config, self.vision_tower, self.connector, lambda: next(self.connector.parameters())
        )
        self.language_model = init_vllm_registered_model(
            vllm_config,
            hf_config=config.text_config,
            architectures=[self.served.architecture],
            prefix="language_model",
        )

        def make_block(index: int) -> Block:
            return Block(config.cross_attention_config, vllm_config, f"cross_attention_blocks.{index}")

        insert(self.language_model, self.served, config, make_block)
        self.kernel_name = "cross_attention_blocks.0.attn.kernel"
        self.image_features = ImageFeatures(vllm_config.additional_config.get(OPTION, DEFAULT_BYTES))
        self.tiled = config.vision_config.model_type in TILED_VISION_TYPES
        self.tokens_per_image = 0  # It is set when the first image is encoded.

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """Runs the vision tower and the connector on new images.

        Returns image tokens `(image tokens, context_size)` for each request. With a tiled tower, they include the
        tokens of padding tiles, and one more column says which tokens belong to real tiles (see [`with_real`]).
        """
        pixels, names = list(kwargs["pixel_values"]), list(kwargs["picture_names"])
        counts = [len(each) for each in pixels]
        flat = torch.cat(pixels)
        positions: torch.Tensor | None = None
        keys = [row.numpy().tobytes() for each in names for row in each.cpu()]
        perceiver = self.config.perceiver_config
        if perceiver is not None and perceiver.num_image_positions:
            places = [place for count in counts for place in range(count)]
            positions = torch.tensor(places, device=flat.device)
            keys = [key + place.to_bytes(4, "little") for key, place in zip(keys, places)]

        tiles = Tiles(*(torch.cat(list(kwargs[name])) for name in TILE_INPUTS)) if self.tiled else None

        def encode(indices: list[int]) -> torch.Tensor:
            of_these = None if positions is None else positions[indices][None]
            tiles_of_these = None if tiles is None else tiles.each(lambda each: each[indices][None])
            return self.image_encoder.features(flat[indices][None], tiles_of_these, of_these)[0]

        features = self.image_features.read(flat, keys, encode)
        self.tokens_per_image = features.shape[1]
        if tiles is not None:
            real = tiles.each(lambda each: each[None]).token_mask(None, self.tokens_per_image)
            features = with_real(features, real.view(features.shape[:2]))
        return [each.flatten(0, 1) for each in features.split(counts)]

    def embed_input_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.language_model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_outputs: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes the hidden states of one step.

        Args:
            input_ids, positions (`torch.LongTensor`): `(tokens,)`, the tokens of all requests of the step.
            encoder_outputs (`list[torch.Tensor]`, *optional*): results of [`embed_multimodal`] for the prompts with
                images that begin in this step.
        """
        context = get_forward_context()
        if context.attn_metadata is not None:
            metadata = context.attn_metadata[self.kernel_name]
            if encoder_outputs:
                config = self.config
                images = Images(
                    config.image_visibility,
                    config.image_token_id,
                    self.tokens_per_image,
                    self.tiled,
                    unseeing_reads_all=is_mllama(config),
                )
                context.additional_kwargs[STEP] = read_step_with_images(
                    metadata, input_ids, positions, encoder_outputs, images
                )
            else:
                context.additional_kwargs[STEP] = read_step(metadata, input_ids.shape[0])
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.language_model.compute_logits(hidden_states)
        added = self.config.additional_vocab_size
        if logits is not None and added and not self.config.additional_vocab_in_head:
            logits[..., -added:] = -torch.inf  # The model reads these tokens, but must not generate them.
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the weights of a saved folder. The weights of a part have the names of the part's own checkpoints.

        Raises:
            ValueError: for a weight that is missing, and for a weight that the model does not have.
        """
        of_adapter = weights_of_folder(*self.source)
        if of_adapter is not None:
            weights = of_adapter
        elif is_mllama(self.config):
            weights = as_saved(weights, self.config)
        own = dict(self.named_parameters())
        parts: dict[str, dict[str, torch.Tensor]] = {"vision_tower": {}, "connector": {}}
        loaded: set[str] = set()

        def of_decoder() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                part, _, rest = name.removeprefix("model.").partition(".")
                if part in parts:
                    parts[part][rest] = weight
                elif part != "text_model":
                    raise ValueError(f"Expected weights of a model that hf_xattn saved, got {name!r}.")
                elif (in_block := block_weight(rest)) is None:
                    yield rest, weight
                elif (place := f"language_model.{in_block}") in own:
                    getattr(own[place], "weight_loader", default_weight_loader)(own[place], weight)
                    loaded.add(place)
                else:
                    raise ValueError(f"Expected weights of blocks that the model has, got {place} in the checkpoint.")

        added = with_additional(of_decoder(), self.served, self.config.additional_vocab_size)
        of_text = self.language_model.load_weights(added)
        loaded |= {f"language_model.{name}" for name in of_text}
        for part, given in parts.items():
            module = getattr(self, part)
            named = named_as_in_memory(module, given)
            module.load_state_dict(dict(named), strict=True)
            loaded |= {f"{part}.{name}" for name in module.state_dict()}
        missing = [name for name in own if block_weight(name) is not None and name not in loaded]
        if missing:
            raise ValueError(
                f"Expected all weights of the blocks in the checkpoint, but it lacks {len(missing)}: "
                f"{', '.join(missing[:5])}."
            )
        return loaded
