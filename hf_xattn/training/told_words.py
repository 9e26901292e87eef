"""Which words the pictures tell: half of them must let a regression find the words of the other half.

Answers are full of words that no picture tells, such as the `yes`, `there` and `is` of questions that were asked by
chance. If image tokens were put at the states of these words, too, most of what keys and queries compare would be
noise.
"""

from __future__ import annotations

import torch

from .alignment_rows import CannotAlign, Texts
from .ridge import RidgeSums


TOLD = 0.04  # squared correlation with what is found in pictures that were not fitted; below it a word is left out
MANY = 50  # pictures with a word, and without it: where there are fewer, it stays


class ToldWords:
    """A regression from the inputs of the connector's last layer to words, each of which all tokens of a picture have.

    Args:
        bias (`bool`): whether the layer has one.
        texts (`Texts`): their words are the outputs.
    """

    def __init__(self, bias: bool, texts: Texts):
        self._texts, self._places = texts, {word: place for place, word in enumerate(texts.words)}
        self._shares = torch.tensor([texts.shares[word] for word in texts.words])
        self._tokens = RidgeSums(bias), RidgeSums(bias)  # of every other picture
        self._means = RidgeSums(bias), RidgeSums(bias)  # of the mean token of each picture
        self._squares = [torch.zeros(len(texts.words), dtype=torch.float64) for _ in range(2)]  # of the targets
        self._pictures = 0

    def add(self, features: torch.Tensor, words: set[str]) -> None:
        """Adds the image tokens `(tokens, inputs)` of a picture, and the words of its text."""
        target, half = -self._shares, self._pictures % 2
        target[[self._places[word] for word in words if word in self._places]] += 1
        self._squares[half] += target.square()
        self._tokens[half].add(features, target.to(features.device))
        self._means[half].add(features.mean(0, keepdim=True), target.to(features.device))
        self._pictures += 1

    def keep(self) -> RidgeSums:
        """Leaves the other words out of the texts. Returns the sums of the rest.

        Raises [`CannotAlign`] if the pictures tell fewer than two words.
        """
        share, told = self._shares, self.told()
        judged = self._pictures * torch.minimum(share, 1 - share) >= MANY
        kept = (~judged | (told >= TOLD)).nonzero().flatten()
        words = [self._texts.words[place] for place in kept.tolist()]
        if len(words) < 2:
            raise CannotAlign(
                f"Expected `rows` whose texts name what pictures show, got {self._pictures} pictures that tell "
                f"{len(words)} of {len(self._texts.words)} words."
            )
        self._texts.words = words
        sums = self._tokens[0].plus(self._tokens[1])
        sums.products = sums.products[:, kept.to(sums.products.device)]
        return sums

    def told(self) -> torch.Tensor:
        """Squared correlation of each word `(words,)` with what the other half finds in the mean token of a picture."""
        found = torch.zeros(len(self._places), dtype=torch.float64)
        if self._pictures < 2:
            return found
        for tokens, means, squares in zip(self._tokens, reversed(self._means), reversed(self._squares)):
            solved = tokens.solve()
            both = (solved * means.products).sum(0).clamp(min=0).cpu()
            found += both**2 / ((solved * (means.squares @ solved)).sum(0).cpu() * squares).clamp(min=1e-12) / 2
        return found
