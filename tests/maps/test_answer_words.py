"""Words of generated texts, and their tokens, for tokenizers of every style."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_xattn.maps.answer_maps import words_of


def byte_tokenizer():
    """One token a byte, as GPT-2's tokenizer writes text that it has never seen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(
        models.BPE({"[EOS]": 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}, [])
    )
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="[EOS]")


def metaspace_tokenizer():
    """Pieces that begin with a space, as SentencePiece writes them."""
    pieces = ["[EOS]", "▁", "▁a", "▁red", "▁cir", "cle", ".", "▁it"]
    unigram = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="[EOS]")


def words_tokenizer():
    """One token a word, with spaces between tokens."""
    words = Tokenizer(models.WordLevel({"[EOS]": 0, "a": 1, "red": 2, "circle": 3, ".": 4}, unk_token="[EOS]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[EOS]")


@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer, words_tokenizer])
def test_words_have_the_tokens_that_spell_them(make):
    """A word that gets the tokens of its neighbour, so that its picture shows where the model looked
    for another one.
    """
    tokenizer = make()
    eos = tokenizer.eos_token_id
    ids = [eos, *tokenizer("a red circle.")["input_ids"], eos]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    words = words_of(ids, tokenizer)
    assert [word.text for word in words] == text.split()
    for word in words:
        assert text[word.start :].startswith(word.text)
        spelt = tokenizer.decode([ids[index] for index in word.tokens])
        assert spelt.strip() == word.text
    assert all(ids[index] != eos for word in words for index in word.tokens)


def test_characters_of_several_tokens():
    """A word that ends in the middle of a character, or is missing because of it."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("é😀 ñu")["input_ids"]
    words = words_of(ids, tokenizer)
    assert [word.text for word in words] == ["é😀", "ñu"]
    assert tokenizer.decode([ids[index] for index in words[1].tokens]).strip() == "ñu"
    assert words[0].tokens.stop == 6  # two bytes and four


@pytest.mark.parametrize("text", ["", " \n "])
def test_a_text_without_words_has_none(text):
    """A word of nothing."""
    tokenizer = byte_tokenizer()
    assert words_of(tokenizer(text)["input_ids"], tokenizer) == []
    assert words_of([tokenizer.eos_token_id], tokenizer) == []
