"""Gives a text model ears: it learns to name the frequency of a noisy sine wave in a few seconds.

Cross-attention reads any features. Here these are spectra of short windows, `(batch, windows, frequencies)`, passed as
`cross_attention_states`: there is no vision tower. Windows have an order, so the blocks use a position bias. The text
model stays as it is, only the blocks learn.

python examples/blocks/time_series.py
"""

import math
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_xattn


WORDS = ["<pad>", "<end>", "the", "tone", "is", "2", "3", "4", "5", "6", "7", "8", "9", "hertz"]
PROMPT, FIRST = ["the", "tone", "is"], 2
FREQUENCIES, SECONDS, RATE, WINDOW = 8, 4, 64, 64


def make_waves(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Waves of any phase and loudness with noise, `(count, samples)`, and their frequencies in hertz."""
    hertz = torch.randint(FIRST, FIRST + FREQUENCIES, (count,), generator=generator)
    phase, loudness = torch.rand(2, count, 1, generator=generator)
    seconds = torch.arange(SECONDS * RATE)[None] / RATE
    waves = (0.5 + loudness) * torch.sin(2 * math.pi * (hertz[:, None] * seconds + phase))
    return waves + 0.5 * torch.randn(waves.shape, generator=generator), hertz


def features(waves: torch.Tensor) -> torch.Tensor:
    """Spectra of overlapping windows: `(batch, samples)` to `(batch, windows, frequencies)`."""
    windows = waves.unfold(1, WINDOW, WINDOW // 2) * torch.hann_window(WINDOW)
    return torch.fft.rfft(windows).abs()[..., 1:17].log1p()


def sentences(hertz: torch.Tensor) -> torch.Tensor:
    """`the tone is 5 hertz <end>` as ids, `(batch, text_len)`."""
    words = [[*PROMPT, str(int(each)), "hertz", "<end>"] for each in hertz]
    return torch.tensor([[WORDS.index(word) for word in sentence] for sentence in words])


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more cost time with tensors this small
    generator = torch.Generator().manual_seed(0)
    text = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.1,
        )
    )
    model = hf_xattn.retrofit(
        text,
        cross_attention_layers=[1, 3],
        cross_attention={"context_size": 16, "position_bias": True, "qk_norm": True},
    )
    hf_xattn.freeze_base(model)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)

    start = time.perf_counter()
    model.train()
    for step in range(60):
        waves, hertz = make_waves(64, generator)
        ids = sentences(hertz)
        labels = ids.clone()
        labels[:, : len(PROMPT)] = -100
        loss = model(ids, cross_attention_states=features(waves), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    print(f"trained in {time.perf_counter() - start:.0f} s")

    model.eval()
    waves, hertz = make_waves(500, torch.Generator().manual_seed(1))
    prompt = sentences(hertz)[:, : len(PROMPT)]
    heard = model.generate(prompt, cross_attention_states=features(waves), max_new_tokens=3, do_sample=False)
    said = [" ".join(WORDS[token] for token in row[len(PROMPT) :]) for row in heard.tolist()]
    right = sum(answer.split()[0] == str(int(truth)) for answer, truth in zip(said, hertz)) / len(said)
    print(f"a new wave of {int(hertz[0])} hertz: {' '.join(PROMPT)} {said[0]}")
    print(f"frequencies right: {right:.1%} of {len(said)} new waves (by chance: {1 / FREQUENCIES:.1%})")
    print(f"learnt: {right > 0.95}")


if __name__ == "__main__":
    main()
