"""Turns labelled pictures into a folder that `hf-xattn train` reads, and a folder of held-out questions.

python examples/garments/make_rows.py SOURCE OUTPUT [--pictures 4000 --questions 2 --labels bag dress]

OUTPUT/train and OUTPUT/held_out hold pictures and `metadata.jsonl`, a question a line, with its kind. No picture of a
thing is in both. The held-out questions are half in the phrasings of training, half in phrasings that training never
holds, which their kind says.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from pictures import place_things, read_source
from questions import NEEDS_TWO, PHRASINGS, Question, ask, ask_without_picture


TEXT_SHARE = 0.05


def as_row(question: Question, picture: str | None) -> dict:
    return ({} if picture is None else {"file_name": picture}) | question._asdict()


def write_folder(
    folder: Path, pictures: list, labels: list[str], count: int, questions: int, size: int, seed: int, new: float
) -> int:
    """Writes `count` pictures, `questions` about each of them, and some without a picture.

    Args:
        new (`float`): share of the questions in phrasings that training never holds.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        picture, things = place_things(pictures, rng, size)
        name = f"{index:05}.png"
        picture.save(folder / name)
        fitting = [kind for kind in PHRASINGS if len(things) == 2 or kind not in NEEDS_TWO]
        # Kinds that ask for two things are asked more often where there are two, so that all are equally frequent.
        weights = np.array([2.0 if kind in NEEDS_TWO else 1.0 for kind in fitting])
        for kind in rng.choice(fitting, min(questions, len(fitting)), replace=False, p=weights / weights.sum()):
            names = [labels[thing.label] for thing in things]
            rows.append(as_row(ask(str(kind), names, labels, rng, new=bool(rng.random() < new)), name))
    rows += [as_row(ask_without_picture(labels, rng), None) for _ in range(max(1, int(TEXT_SHARE * len(rows))))]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pictures", type=int, default=4000, help="pictures to train on (default: 4000)")
    parser.add_argument("--held-out", type=int, default=300, help="held-out pictures (default: 300)")
    parser.add_argument("--questions", type=int, default=2, help="questions about a picture (default: 2)")
    parser.add_argument("--size", type=int, default=32, help="height of a picture; it is twice as wide (default: 32)")
    parser.add_argument("--labels", nargs="+", help="only these labels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        source = read_source(options.source, options.labels)
        for name in ("train", "held_out"):
            (options.output / name).mkdir(parents=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, pictures, count, new in (
        ("train", source.train, options.pictures, 0.0),
        ("held_out", source.held_out, options.held_out, 0.5),
    ):
        seed = 2 * options.seed + (name == "held_out")
        written = write_folder(
            options.output / name, pictures, source.labels, count, options.questions, options.size, seed, new
        )
        print(f"{written} questions about {count} pictures: {options.output / name}")


if __name__ == "__main__":
    main()
