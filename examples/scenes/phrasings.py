"""The kinds of question, and the phrasings of each in training and in development.

No phrasing is in two splits. Those of the sealed test stand in `sealed.json`. The words in braces are filled in by the
picture; every phrasing of a kind has all of them.
"""

# Kinds of question, each with a picture; `TEXT` is the kind of those without one.
KINDS = ("count", "compare", "relate", "locate", "read", "find", "rank", "value")
TEXT = "text"

TRAIN = {
    "count": (
        "How many {group} are there?",
        "How many {group} are in the picture?",
        "Count the {group}.",
        "How many {group} do you see?",
        "What is the number of {group}?",
        "Tell me how many {group} the picture shows.",
        "How many {group} can be seen here?",
    ),
    "compare": (
        "Which object is the {most}?",
        "What is the {most} object?",
        "Name the {most} object in the picture.",
        "Which of the objects is {most}?",
        "Tell me which object is the {most} one.",
        "What is the {most} thing that you see?",
        "Find the {most} object and name it.",
    ),
    "relate": (
        "Where is the {one}, seen from the {other}?",
        "In which direction from the {other} is the {one}?",
        "Is the {one} left of, right of, above or below the {other}?",
        "How does the {one} lie relative to the {other}?",
        "Which side of the {other} is the {one} on?",
        "Start at the {other}: where is the {one}?",
        "Tell me where the {one} is, seen from the {other}.",
    ),
    "locate": (
        "Where in the picture is the {one}?",
        "In which part of the picture is the {one}?",
        "Where do you see the {one}?",
        "What is the place of the {one} in the picture?",
        "Which part of the picture shows the {one}?",
        "Tell me the place of the {one}.",
        "Look for the {one}. Where is it?",
    ),
    "read": (
        "What is the {field}?",
        "What does the page give as the {field}?",
        "Read the {field}.",
        "Which {field} is written there?",
        "Tell me the {field} on the page.",
        "What stands behind the word {field}?",
        "Which {field} do you read?",
    ),
    "find": (
        "On which line is the word {word}?",
        "Which line has the word {word}?",
        "In which line do you read {word}?",
        "Find the word {word}. Which line is it on?",
        "Tell me the line of the word {word}.",
        "Which of the lines holds {word}?",
        "Where is the word {word}, on which line?",
    ),
    "rank": (
        "Which bar has the {most} value?",
        "What has the {most} value in the chart?",
        "Name the bar with the {most} value.",
        "Which label belongs to the {most} value?",
        "Tell me which bar shows the {most} value.",
        "Whose value is the {most}?",
        "Find the bar of the {most} value and name it.",
    ),
    "value": (
        "How much is {label}?",
        "What is the value of {label}?",
        "Read the value of {label}.",
        "Which value does the bar {label} have?",
        "Tell me the value of the bar {label}.",
        "What number does {label} reach?",
        "How much does the chart show for {label}?",
    ),
    "text capital": ("What is the capital of {country}?", "Name the capital of {country}."),
    "text opposite": ("What is the opposite of {word}?", "Name the opposite of the word {word}."),
    "text sum": ("What is {a} plus {b}?", "How much is {a} + {b}?"),
    "text day": ("Which day comes after {day}?", "What day is it the day after {day}?"),
    "text letters": ("Write in capital letters: {word}", "Write the word {word} in capital letters."),
}
DEVELOPMENT = {
    "count": (
        "How many {group} does the picture show?",
        "Please count how many {group} there are.",
        "Give the number of {group} in the picture.",
    ),
    "compare": (
        "Of all objects, which is the {most}?",
        "Say what the {most} object is.",
        "Which thing is the {most} of all?",
    ),
    "relate": (
        "From the {other}, where do I find the {one}?",
        "On what side of the {other} do you see the {one}?",
        "Compared with the {other}, where is the {one}?",
    ),
    "locate": (
        "Where is the {one}?",
        "Say where the {one} is in the picture.",
        "In what part of the picture do you find the {one}?",
    ),
    "read": (
        "What {field} does the page show?",
        "Say which {field} is on the page.",
        "Look for the {field}. What is it?",
    ),
    "find": (
        "The word {word} is on which line?",
        "Say which line the word {word} is on.",
        "In what line of the text is {word}?",
    ),
    "rank": (
        "Which one has the {most} value?",
        "Say which label has the {most} value.",
        "In the chart, what is the bar with the {most} value?",
    ),
    "value": (
        "What value does {label} have?",
        "Say how much {label} is.",
        "In the chart, how high is the value of {label}?",
    ),
    "text capital": ("Which city is the capital of {country}?",),
    "text opposite": ("Which word is the opposite of {word}?",),
    "text sum": ("Add {a} and {b}.",),
    "text day": ("After {day} comes which day?",),
    "text letters": ("Put this word into capital letters: {word}",),
}
