"""Backends of `torch.compile` and options of `generate` for tests of compiled models."""

from transformers import CompileConfig


def counting_backend():
    """A backend that runs graphs as they are, and a list with an entry for each. (`generate` copies the backend, so
    that it must be a function.)
    """
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def compiled(backend):
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, "disable_compile": False}


GREEDY, SAMPLING = {"do_sample": False}, {"do_sample": True, "top_k": 10}
