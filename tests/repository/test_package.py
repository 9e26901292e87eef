"""The package as a whole: import, registration, layout."""

import json
import re
import subprocess
import sys
from pathlib import Path

import hf_xattn


ROOT = Path(hf_xattn.__file__).parents[1]


def test_import_is_cheap():
    """An import that pulls vision, plotting or training libraries beyond what transformers itself pulls."""
    script = (
        "import sys, json, torch, transformers; from transformers import PreTrainedModel, GenerationMixin, "
        "ProcessorMixin;before = set(sys.modules); import hf_xattn;"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    new = set(json.loads(output.splitlines()[-1]))
    heavy = {"PIL", "torchvision", "matplotlib", "sklearn", "cv2", "datasets", "scipy", "pandas", "tensorflow"}
    assert not new & heavy


def test_registered_with_the_auto_classes():
    """A model type that an Auto class does not know."""
    import transformers

    config = hf_xattn.XAttnConfig
    assert transformers.AutoConfig.for_model("xattn_block").model_type == "xattn_block"
    assert transformers.AutoModel._model_mapping[config] is hf_xattn.XAttnModel
    assert transformers.AutoModel._model_mapping[hf_xattn.CrossAttentionConfig] is hf_xattn.GatedCrossAttentionBlock
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        auto_class = getattr(transformers, name, None)
        if auto_class is not None:
            assert auto_class._model_mapping[config] is hf_xattn.XAttnForConditionalGeneration


def test_registered_under_the_names_that_transformers_looks_up():
    """A class that `Trainer` takes for one whose labels are not shifted, that pipelines warn of, and that `serve`
    refuses.
    """
    from transformers.models.auto import modeling_auto

    from hf_xattn.utils.architectures import causal_model_types

    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        assert names["xattn"] == "XAttnForConditionalGeneration"
        assert len(list(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING"))) > 10  # the lazy tables still load
    assert "xattn" not in causal_model_types()


def test_transformers_has_the_class():
    """A folder that TRL's trainers load as another class, or not at all; a lookup that loads all of transformers."""
    script = (
        "import sys, transformers as first, hf_xattn, transformers as second; loaded = set(sys.modules);"
        "known = (first.XAttnForConditionalGeneration, second.XAttnForConditionalGeneration);"
        "assert known == (hf_xattn.XAttnForConditionalGeneration,) * 2;"
        "assert loaded == set(sys.modules) and 'transformers.trainer' not in loaded; second.LlamaForCausalLM"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_file_is_too_long():
    """A file that holds more than one concept. Examples in docstrings do not count."""
    example = re.compile(r"\n +Example:\n\n +```python\n.*?```", re.DOTALL)
    long = {
        path.name: length
        for path in ROOT.glob("hf_xattn/**/*.py")
        if (length := len(example.sub("", path.read_text()).splitlines())) > 500
    }
    assert not long


def test_import_is_light():
    """An import that waits for what only training, serving or drawing needs."""
    heavy = ("transformers.training_args", "transformers.trainer", "peft", "trl", "fastapi", "matplotlib", "datasets")
    script = f"import sys, hf_xattn; print([name for name in {heavy!r} if name in sys.modules])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
