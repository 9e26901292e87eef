"""Backends of `torch.compile` and options of `generate` for tests of compiled models."""

import torch
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


def replaying_backend():
    """A backend whose graph writes over its results when it runs again, as CUDA graphs do. torch raises an error there;
    here the old results become zeros.
    """
    results = []

    def backend(graph, inputs):
        def run(*given):
            for tensor in results:
                tensor.zero_()
            outputs = graph.forward(*given)
            known = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
            results[:] = [each for each in outputs if each.untyped_storage().data_ptr() not in known]
            return outputs

        return run

    return backend


def compiled(backend):
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, "disable_compile": False}


GREEDY, SAMPLING = {"do_sample": False}, {"do_sample": True, "top_k": 10}
