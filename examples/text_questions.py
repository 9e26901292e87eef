"""200 questions that no picture concerns, each with a word that a right answer holds.

They show what a language model keeps when it learns to see. Nothing trains on them: the prompts of `hf-xattn train` are
others.
"""

from __future__ import annotations

import re


TEXT_TOKENS = 24  # of an answer

# What completes a question, and a word that the right answer holds.
_COMPLETED = {
    "What is the capital of {}?": (
        "France: Paris, Italy: Rome, Germany: Berlin, Spain: Madrid, England: London, Russia: Moscow, Egypt: "
        "Cairo, Greece: Athens, China: Beijing, Portugal: Lisbon, Austria: Vienna, Hungary: Budapest, Norway: "
        "Oslo, Denmark: Copenhagen, Finland: Helsinki, Ireland: Dublin, Belgium: Brussels, Peru: Lima, Cuba: "
        "Havana, Argentina: Buenos Aires, Kenya: Nairobi, Thailand: Bangkok, Iraq: Baghdad, Iran: Tehran, South "
        "Korea: Seoul, Romania: Bucharest, Bulgaria: Sofia, Scotland: Edinburgh, Chile: Santiago, Vietnam: Hanoi, "
        "Syria: Damascus, the Philippines: Manila"
    ),
    "Which country is {} the capital of?": (
        "Tokyo: Japan, Canberra: Australia, Brasilia: Brazil, Wellington: New Zealand, Prague: Czech, Kabul: "
        "Afghanistan, Caracas: Venezuela, Rabat: Morocco, Jakarta: Indonesia, Amsterdam: Netherlands"
    ),
    "On which continent is {}?": (
        "Brazil: South America, Kenya: Africa, India: Asia, Egypt: Africa, Peru: South America, China: Asia, "
        "Germany: Europe, Mexico: North America, Nigeria: Africa, Japan: Asia, Spain: Europe, Chile: South "
        "America, Thailand: Asia, Italy: Europe, Cuba: North America"
    ),
    "What language is spoken in {}?": (
        "Mexico: Spanish, Portugal: Portuguese, Brazil: Portuguese, Germany: German, Japan: Japanese, Italy: "
        "Italian, Russia: Russian, Cuba: Spanish, Sweden: Swedish, Poland: Polish, Greece: Greek, Chile: Spanish, "
        "Australia: English"
    ),
    "What is the currency of {}?": (
        "India: rupee, Russia: ruble, Mexico: peso, Switzerland: franc, Germany: euro, Thailand: baht"
    ),
    "What is the opposite of {}?": (
        "hot: cold, big: small, up: down, left: right, day: night, wet: dry, high: low, full: empty, heavy: light, "
        "strong: weak, rich: poor, early: late, true: false, front: back, happy: sad, inside: outside, loud: "
        "quiet, win: lose, buy: sell, north: south, east: west, black: white, love: hate, wide: narrow, tall: "
        "short, thick: thin, first: last"
    ),
    "What is the plural of {}?": (
        "child: children, foot: feet, tooth: teeth, man: men, woman: women, goose: geese, wolf: wolves, leaf: "
        "leaves, city: cities, box: boxes, knife: knives, baby: babies"
    ),
    "What is the past tense of {}?": (
        "go: went, eat: ate, run: ran, take: took, write: wrote, come: came, give: gave, buy: bought, think: "
        "thought, sing: sang, drink: drank, fly: flew, speak: spoke, swim: swam"
    ),
    "What is {}?": (
        "2 + 3: 5, 4 + 4: 8, 10 + 5: 15, 7 + 2: 9, 6 + 6: 12, 20 + 20: 40, 9 - 4: 5, 10 - 3: 7, 12 - 2: 10, 3 * 3: "
        "9, 5 * 2: 10, 8 / 2: 4"
    ),
    "Who wrote {}?": (
        "Romeo and Juliet: Shakespeare, Macbeth: Shakespeare, Pride and Prejudice: Austen, Oliver Twist: Dickens, "
        "the Odyssey: Homer, War and Peace: Tolstoy, Don Quixote: Cervantes, Harry Potter: Rowling"
    ),
    "What is the color of {}?": (
        "grass: green, coal: black, a lemon: yellow, milk: white, blood: red, a strawberry: red, chocolate: brown, "
        "a ripe tomato: red, a polar bear: white, the sky on a clear day: blue"
    ),
    "What do we call a baby {}?": (
        "cat: kitten, cow: calf, sheep: lamb, duck: duckling, bear: cub, frog: tadpole, pig: piglet"
    ),
    "Which day comes after {}?": (
        "Monday: Tuesday, Tuesday: Wednesday, Thursday: Friday, Friday: Saturday, Sunday: Monday"
    ),
    "Which month comes after {}?": "January: February, March: April, May: June, August: September, November: December",
}

TEST_PROMPTS = (
    *(
        (question.format(words), answer)
        for question, completed in _COMPLETED.items()
        for words, answer in (each.split(": ") for each in completed.split(", "))
    ),
    ("Which planet do we live on?", "Earth"),
    ("Which planet is the largest in the solar system?", "Jupiter"),
    ("Which planet is known as the red planet?", "Mars"),
    ("What is the star at the center of the solar system?", "Sun"),
    ("Who painted the Mona Lisa?", "Leonardo"),
    ("Who developed the theory of relativity?", "Einstein"),
    ("Who was the first president of the United States?", "Washington"),
    ("Who discovered gravity, as the story of the apple tells?", "Newton"),
    ("What is the largest ocean?", "Pacific"),
    ("What is the longest river in Africa?", "Nile"),
    ("What is the highest mountain on Earth?", "Everest"),
    ("What is the chemical formula of water?", "H2O"),
    ("What gas do plants take in from the air?", "carbon"),
    ("What gas do humans need to breathe?", "oxygen"),
    ("What do bees make?", "honey"),
    ("What color do you get if you mix blue and yellow?", "green"),
    ("Which animal is known as the king of the jungle?", "lion"),
    ("What is frozen water called?", "ice"),
    ("Who painted The Starry Night?", "Gogh"),
    ("Who was the first man on the moon?", "Armstrong"),
    ("Which season comes after spring?", "summer"),
    ("Which animal gives us wool?", "sheep"),
    ("Which organ pumps blood through the body?", "heart"),
    ("What is the largest desert in Africa?", "Sahara"),
)


def holds(answer: str, word: str) -> bool:
    """Whether an answer holds a word, as a word: `ice` is not in `juice`."""
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None
