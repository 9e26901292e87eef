"""The page for a model, served by Gradio in this process on a free port."""

import sys
import threading
import time
from contextlib import contextmanager

from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn.commands.servers import bind
from hf_xattn.serving.web import build_page


@contextmanager
def served(folder, **options):
    """Yields the address, the model and the processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    model.enable_image_store()
    processor = AutoProcessor.from_pretrained(folder)
    page = build_page(model, processor, **options)
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        if sys.platform != "linux":  # on Linux nobody else gets the port before Gradio has it
            listener.close()
        page.launch(server_name="127.0.0.1", server_port=port, quiet=True, prevent_thread_lock=True)
    try:
        yield f"http://127.0.0.1:{port}", model, processor
    finally:
        page.close(verbose=False)


@contextmanager
def slow(model, seconds=0.1):
    """Makes each step of the model take its time. Yields a list that grows with each step."""
    steps = []

    def wait(*_):
        steps.append(1)
        time.sleep(seconds)

    hook = model.lm_head.register_forward_hook(wait)
    try:
        yield steps
    finally:
        hook.remove()


def nobody_answers(timeout=20):
    """Waits until no thread generates an answer. Returns whether that came."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if not any(thread.name == "hf_xattn answer" for thread in threading.enumerate()):
            return True
        time.sleep(0.02)
    return False
