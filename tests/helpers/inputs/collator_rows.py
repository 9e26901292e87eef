"""Rows for tests of the collator, and what their labels say."""

from helpers.models.template_models import picture


QUESTION, ANSWER = "what is in the picture ?", "a red circle."
LONG = {
    "messages": [
        {"role": "system", "content": "answer in short."},
        {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": [{"type": "text", "text": "  a red circle.\n"}]},
        {"role": "user", "content": "are you sure ?"},
        {"role": "assistant", "content": "yes, é😀 a blue one."},
    ]
}
SHORT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def said(processor, labels):
    """The runs of labels that count, decoded: one text for each answer."""
    runs, run = [], []
    for label in [*labels.tolist(), -100]:
        if label != -100:
            run.append(label)
        elif run:
            runs.append(processor.tokenizer.decode(run, clean_up_tokenization_spaces=False))
            run = []
    return runs


def row(answer, question=QUESTION, **message):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **message}]}
