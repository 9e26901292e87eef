"""`run_start.start` in several processes, each of which prints the sum of its connector and blocks: MODEL DATA."""

import os
import sys

import torch
from accelerate import PartialState
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn import load_rows
from hf_xattn.training.run_start import start


if __name__ == "__main__":
    folder, data = sys.argv[1:]
    PartialState(cpu=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
    parts = [model.model.connector, *model.model.blocks]
    if os.environ["RANK"] != "0":  # weights that are not loaded, as with FSDP's `cpu_ram_efficient_loading`
        for part in parts:
            for weight in part.parameters():
                torch.nn.init.ones_(weight)
    found = start(model, AutoProcessor.from_pretrained(folder), load_rows(data), torch.device("cpu"))
    total = sum(float(weight.detach().double().abs().sum()) for part in parts for weight in part.parameters())
    print(f"{found}, {total!r}")
