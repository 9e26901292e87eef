"""Chat templates, written here in each style of the families of text models, and a processor for them."""

from transformers import SiglipImageProcessorPil

from helpers.models.word_models import make_picture
from hf_xattn import XAttnProcessor


LOOP = "{% for message in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"

# Each is given texts and no lists, by the models of its family.
TEXT_TEMPLATES = {
    "concatenation": LOOP + "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}" + ASK,
    "list_printed": LOOP + "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}" + ASK,
    "trim": LOOP + "<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}" + ASK,
    "guard": LOOP
    + "{% if message.content is string %}{% set said = message.content %}{% else %}{% set said = '' %}{% endif %}"
    + "<|{{ message.role }}|>{{ said }}{{ eos_token }}"
    + ASK,
    "guard_around": LOOP
    + "{% if message.content is string %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endif %}"
    + ASK,
    "system_first": "{% if messages[0]['role'] == 'system' %}<|system|>{{ messages[0]['content'] + eos_token }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<|{{ message.role }}|>{{ message.content + eos_token }}" + ASK,
    "alternating": "{% if messages[0].role == 'system' %}{% set first = messages[0].content.strip() %}{% set rest = messages[1:] %}"  # noqa: E501
    "<|system|>{{ first }}{{ eos_token }}{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif "
    "%}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}" + ASK,
    "foreign_marker": LOOP + "<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|foreign|>{% else %}{{ part.text }}{% endif %}{% "
    "endfor %}"
    "{% endif %}{{ eos_token }}" + ASK,
    "parts_without_images": LOOP
    + "<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{{ eos_token }}"
    + ASK,
    "only_parts": LOOP
    + "<|{{ message.role }}|>{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{{ eos_token }}" + ASK,
    "system_text_and_parts": LOOP
    + "{% if message.role == 'system' %}<|system|>{{ message.content + eos_token }}{% else %}"
    "<|{{ message.role }}|>{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ "
    "eos_token }}"
    "{% endif %}" + ASK,
}
# Knows images, and writes <image> itself, each on a line of its own.
SEEING = (
    LOOP
    + "<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"  # noqa: E501
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}"
    + ASK
)
# Sees, and reads lists only: images first, then texts. A plain string gives it nothing.
IMAGES_FIRST = (
    LOOP
    + "<|{{ message.role }}|>{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"  # noqa: E501
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{{ eos_token "
    "}}" + ASK
)
WORDS = (
    "[PAD] [EOS] [UNK] [BOS] <|system|> <|user|> <|assistant|> <|bot|> <|foreign|> User Assistant System : . ? a b c "
    "what is in the picture dog cat be brief and this one two here tool"
).split()


def make_tokenizer(bos=False):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        bos_token="[BOS]" if bos else None,
        padding_side="left",
    )
    if bos:
        ends = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 3), ("[EOS]", 1)])
        tokenizer.backend_tokenizer.post_processor = ends
    tokenizer.add_tokens([word for word in WORDS if word.startswith("<|")], special_tokens=True)
    return tokenizer


def make_processor(template=None, marker=None, own=None, bos=False):
    tokenizer = make_tokenizer(bos)
    tokenizer.chat_template = template
    if marker:
        tokenizer.add_tokens([marker], special_tokens=True)
    image_processor = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    return XAttnProcessor(image_processor, tokenizer, chat_template=own, image_token=marker)


def text(said):
    return {"type": "text", "text": said}


def image(seed=0, **source):
    return {"type": "image", **(source or {"image": make_picture(seed)})}


TALK = [
    {"role": "system", "content": [text("be brief .")]},
    {"role": "user", "content": [image(0), text("what is this ?"), image(1), text("and this ?")]},
    {"role": "assistant", "content": [text("a dog and a cat .")]},
    {"role": "user", "content": [text("is "), image(2), text("one ?")]},
]


def flat(messages, marker):
    """What a person would write for the template by hand."""
    return [
        {**m, "content": "".join(p["text"] if p["type"] == "text" else marker or "" for p in m["content"])}
        for m in messages
    ]
