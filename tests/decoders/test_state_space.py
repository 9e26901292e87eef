"""State-space decoders, whose caches do not know how much text there was; positions of text and images."""

import copy
import logging
import warnings

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from helpers.models.marked_models import close, generate, state_space
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_decoders import CONTEXT_SIZE, SERVED, make_tiny, retrofitted
from helpers.models.tiny_models import make_model, needs_part, pixels, randomize, strengthen, token_ids
from hf_xattn.cache.image_cache import select_images
from hf_xattn.decoders import decoder
from hf_xattn.decoders.decoder import find_cache_argument
from hf_xattn.storage.image_files import combine_images
from hf_xattn.utils.architectures import architecture
from hf_xattn.utils.transformers_api import CACHE, has


ONE_BY_ONE = needs_part("prefill_chunk_size")  # after cached text


@pytest.mark.parametrize(
    "name", [pytest.param("mamba", marks=ONE_BY_ONE), pytest.param("falcon_mamba", marks=ONE_BY_ONE), "mamba2"]
)
def test_state_space_decoders_with_a_callers_cache(name):
    """A cache whose layers do not know how much text there was."""
    model, ids, images = state_space(name), token_ids(2, 6), pixels()
    expected = generate(model, ids, pixel_values=images, use_cache=False)
    cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())
    first = generate(model, ids, pixel_values=images, cache=cache, return_dict_in_generate=True)
    assert torch.equal(first.sequences, expected)
    chat = torch.cat([first.sequences, token_ids(2, 3, seed=8)], dim=1)
    text = {"attention_mask": torch.ones_like(chat)}  # or transformers takes generated padding tokens for padding
    second = generate(model, chat, cache=cache, **text)
    assert torch.equal(second, generate(model, chat, pixel_values=images, use_cache=False, **text))


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_position_bias_with_a_cache(name):
    """Positions that start anew in a later piece of text, or a decoder whose cache has no length to ask for."""
    block = {"position_bias": True}
    ids, images = token_ids(2, 9), pixels(2, 2)
    model = (
        state_space(name, cross_attention_config=block) if name == "mamba" else make_model(cross_attention_config=block)
    )
    expected = model(ids, pixel_values=images, use_cache=False).logits
    cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())
    parts = [model(ids[:, :4], pixel_values=images, cache=cache).logits]
    # transformers' Mamba itself reads more than one token after its states inexactly.
    rest = ids[:, 4:].split(1 if name == "mamba" else 3, dim=1)
    parts += [model(part, cache=cache).logits for part in rest]
    assert close(torch.cat(parts, dim=1), expected)
    assert torch.equal(
        generate(model, ids, pixel_values=images), generate(model, ids, pixel_values=images, use_cache=False)
    )


@torch.no_grad()
def test_position_bias_does_not_count_padding():
    """A row whose real images stand behind padding images, at other positions than alone."""
    model, ids, images = make_model(cross_attention_config={"position_bias": True}), token_ids(2, 5), pixels(2, 3)
    mask = torch.tensor([[False, True, True], [True, False, True]])
    logits = model(ids, pixel_values=images, image_mask=mask).logits
    for row in range(2):
        alone = model(ids[row : row + 1], pixel_values=images[row : row + 1, mask[row]]).logits
        assert close(logits[row : row + 1], alone)


@torch.no_grad()
def test_selected_and_combined_images_beside_a_state_space_decoder():
    """Encoded images whose text half has no layers for states."""
    model, ids, images = state_space("mamba"), token_ids(2, 5), pixels(2)
    expected = model(ids, pixel_values=images, use_cache=False).logits
    encoded = model.encode_images(pixel_values=images)
    for cache in (
        select_images(encoded, [0, 1]),
        combine_images([select_images(encoded, [0]), select_images(encoded, [1])]),
    ):
        assert close(model(ids, cache=cache).logits, expected)


def _recurrent():
    """Decoders with layers that keep a running state of the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny sizes leave special tokens outside the vocabulary
        caches = {name: DynamicCache(config=tiny_config(name)) for name in SERVED}
    return [
        name
        for name, cache in caches.items()
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    ]


class PaddedTalk:
    """Two rows of text, of which the first begins with padding, and each row alone without padding,
    as the reference.
    """

    def __init__(self, name):
        self.base = strengthen(make_tiny(name))
        self.model = randomize(retrofitted(copy.deepcopy(self.base)))
        self.states = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
        self.images = {"cross_attention_states": self.states}
        self.ids, self.more = token_ids(2, 9), token_ids(2, 4, seed=8)
        self.mask, self.ones = torch.ones_like(self.ids), torch.ones_like(self.more)
        self.mask[0, :3] = 0

    def off(self, ids, mask, logits, alone=False):
        """How far `logits` of the last positions are from those of each row by itself, as a share of their deviation.

        With `alone` they are of the base, and there are no images.
        """
        worst = 0.0
        for row in range(2):
            real = mask[row].bool()
            images = {} if alone else {"cross_attention_states": self.states[row : row + 1]}
            model = self.base if alone else self.model
            expected = model(ids[row, real][None], use_cache=False, **images).logits[0]
            found = logits[row, real[-logits.shape[1] :]]
            worst = max(worst, ((found - expected[-len(found) :]).abs().max() / expected.std()).item())
        return worst

    def says(self, ids, mask, **options):
        """An answer of two tokens, its mask and cache, and how far off it is."""
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
        options |= {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
        outputs = self.model.generate(ids, attention_mask=mask, **options)
        mask = torch.cat([mask, self.ones[:, :2]], dim=1)
        off = self.off(outputs.sequences[:, :-1], mask[:, :-1], torch.stack(outputs.logits, dim=1))
        return outputs.sequences, mask, outputs[CACHE], off

    def turn(self, padding=0):
        """A second turn after the padded first one, with or without padding in front of the new text of the second
        row.
        """
        ids, mask, cache, _ = self.says(self.ids, self.mask, **self.images)
        new = self.ones.clone()
        new[1, :padding] = 0
        chat = torch.cat([ids, self.more * new], dim=1), torch.cat([mask, new], dim=1)
        return self.says(*chat, cache=cache)[-1]

    def chunks(self, size):
        return self.says(self.ids, self.mask, prefill_chunk_size=size, **self.images)[-1]

    def embedded(self):
        """Whether embeddings with a static cache give other words than ids."""
        options = {
            "attention_mask": self.mask,
            "max_new_tokens": 2,
            "do_sample": False,
            "eos_token_id": None,
            **self.images,
        }
        expected = self.model.generate(self.ids, **options)
        embeds = self.model.get_input_embeddings()(self.ids)
        found = self.model.generate(inputs_embeds=embeds, cache_implementation="static", **options)
        return float(not torch.equal(found, expected[:, 9:]))

    def parts(self, lengths, mask=None, alone=False):
        """A text in several calls, each with the mask of the text so far."""
        model, mask = self.base if alone else self.model, self.mask if mask is None else mask
        name = find_cache_argument(model) if alone else "cache"
        given, cache, read, logits = {} if alone else self.images, None, 0, []
        for part in self.ids.split(lengths, dim=1):
            read += part.shape[1]
            outputs = model(part, attention_mask=mask[:, :read], use_cache=True, **{name: cache}, **given)
            given, cache = {}, outputs[name if alone else CACHE]
            logits.append(outputs.logits)
        return self.off(self.ids, mask, torch.cat(logits, dim=1), alone)

    def gap(self, lengths=None, alone=False):
        """A text with padding between its words: a prompt of `generate`, or the text of calls of `forward`."""
        mask = self.mask.flip(0).clone()
        mask[0, 4] = 0
        return self.says(self.ids, mask, **self.images)[-1] if lengths is None else self.parts(lengths, mask, alone)


# What is asked, and the error where a running state would take padding in; None for an answer as of each row alone.
AFTER, FRONT, DROPS = "got it after text in rows ", "read one token at a time, got it in rows ", "drops its state"
PADDING = {
    "a padded first turn": (lambda talk: talk.says(talk.ids, talk.mask, **talk.images)[-1], None),
    "a second turn after it": (lambda talk: talk.turn(), None),
    "padding in the second turn": (lambda talk: talk.turn(2), AFTER + r"\[1\]"),
    "padding in chunks of 1": (lambda talk: talk.chunks(1), FRONT + r"\[0\]"),
    "padding in chunks of 2": (lambda talk: talk.chunks(2), None),
    "padding in chunks of 4": (lambda talk: talk.chunks(4), None),
    "a chunk of all": (lambda talk: talk.chunks(9), None),
    "steps with a mask": (lambda talk: talk.parts([6, 1, 1, 1]), None),
    "embeddings in a static cache": (lambda talk: talk.embedded(), None),
    "padding in steps": (lambda talk: talk.parts([1] * 9), FRONT + r"\[0\]"),
    "padding beside beams": (
        lambda talk: talk.model.generate(
            talk.ids, attention_mask=talk.mask.flip(0), num_beams=3, prefill_chunk_size=1, max_new_tokens=1
        ),
        FRONT + r"\[1\]",
    ),
    "padding in a prompt": (lambda talk: talk.gap(), AFTER + r"\[0\]"),
    "padding behind a prompt": (lambda talk: talk.says(talk.ids, talk.mask.flip(1), **talk.images), AFTER + r"\[0\]"),
    "padding in a later call": (lambda talk: talk.gap([3, 6]), f"{AFTER}\\[0\\]|{DROPS}"),
}


OFTEN = ("mamba", "falcon_mamba", "mamba2", "jamba", "bamba", "qwen3_next", "lfm2")


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in _recurrent()]
)
def test_padding_beside_running_states(name, caplog, monkeypatch):
    """Padding that a running state takes in: another answer than that of the row alone; an error that blames a decoder
    that is right.
    """
    talk = PaddedTalk(name)
    monkeypatch.setattr(logging.getLogger("hf_xattn"), "propagate", True)
    for what, (ask, error) in PADDING.items():
        if (
            error is None
            and architecture(name).forgets
            and what in ("padding in chunks of 2", "padding in chunks of 4")
        ):
            error = DROPS
        if error is None:
            try:
                assert ask(talk) < 0.02, what
            except ValueError:
                if has("prefill_chunk_size"):  # an older transformers reads no chunks after cached text
                    raise
            continue
        with pytest.raises(ValueError, match=error) as raised:
            ask(talk)
        assert type(talk.base).__name__ in str(raised.value), what
    for lengths in ([9], [6, 1, 1, 1]):
        decoder.logger.warning_once.cache_clear()
        caplog.clear()
        assert talk.gap(lengths, alone=True) > 0.02 and AFTER not in caplog.text, "the base alone"
        assert talk.gap(lengths) > 0.02 and AFTER + "[0]" in caplog.text and type(talk.base).__name__ in caplog.text
    assert talk.parts([1] * 9, alone=True) > 0.02, "the base alone"
