"""Programs of transformers' exporter, and small models to export."""

import copy
import warnings

import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

from helpers.models.tiny_models import TEXT_CONFIGS, randomize, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.utils.transformers_api import CACHE, has, needs


needs_exporters = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 11) or not has("ExportedModel"),
    reason=f"transformers' exporters need torch 2.11. {needs('ExportedModel', 'What they return')}",
)


def export(model, inputs, dynamic=True, only=None, **options):
    """Programs of transformers' own exporter: all that `export_for_generation` makes, or one."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
    from transformers.exporters.utils import decompose_for_generation

    exporter, config = DynamoExporter(), DynamoConfig(dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if only is None:
            return exporter.export_for_generation(model, dict(inputs), config, **options).runners
        return {only: exporter.export(*decompose_for_generation(model, dict(inputs))[only], config).runners["model"]}


def around(text):
    """A model with a vision tower around a decoder, as small as exporting is slow."""
    vision = vision_config()
    vision.num_hidden_layers = 1
    layers = [1, len(find_decoder(text)[1])]
    return XAttnConfig(text_config=text.config, vision_config=vision, cross_attention_layers=layers)


def small(name="llama", **options):
    config = TEXT_CONFIGS[name]()
    config.num_hidden_layers = 2
    text = AutoModelForCausalLM.from_config(config).eval()
    config = XAttnConfig(**(around(text).to_dict() | options))
    return randomize(XAttnForConditionalGeneration(config, text_model=text).eval())


def decode_both_ways(model, step, first, steps, prefix=9, same=torch.equal):
    """Decodes with the model and with a program, each with its own cache. Returns the cache of the program."""
    ours, theirs = first[CACHE], copy.deepcopy(first[CACHE])
    token = first.logits[:, -1:].argmax(-1)
    for index in range(steps):
        position = torch.full(token.shape, prefix + index)
        expected = model(token, position_ids=position, cache=ours)
        outputs = step(input_ids=token, position_ids=position, cache=theirs)
        assert same(outputs.logits, expected.logits), index
        ours, theirs = expected[CACHE], outputs[CACHE]
        token = expected.logits.argmax(-1)
    return theirs
