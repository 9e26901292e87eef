"""Asks vLLM and `generate` the same, and prints both as JSON. A process of its own: an engine leaves much behind.

The argument is JSON:

- `folder`, and what to save there first: `model` (arguments of `save_model`) or `tiled` (the kind of `save_tiled`);
- `bare`: the folder is a text model of `save_with_base`;
- `engine` (options of `LLM`), `requests`, `new_tokens`;
- `one_name`: the client gives all pictures one identifier;
- `mode`: "together" (all requests at once), "alone" (one after the other) or "staggered" (requests join and leave a
  running batch).
"""

import json
import os
import sys


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("engine", {}).get("tensor_parallel_size", 1) == 1:
        # As a server, the engine has a process of its own, with a cache of what requests bring.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if given.get("one_name") else "0"
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(core) for core in sorted(os.sched_getaffinity(0))[: given["engine"]["tensor_parallel_size"]]
        )

from helpers.models.template_models import make_processor
from helpers.processes.engine_models import REQUESTS, TILED_REQUESTS, answers, picture, save_model, save_tiled


def count_calls(owner, name, counted):
    """Counts what happens inside the engine, so that a test knows that it happened."""
    original = getattr(owner, name)

    def counting(self, *args, **kwargs):
        counted(self, *args)
        return original(self, *args, **kwargs)

    setattr(owner, name, counting)


def watch():
    """How often the engine preempted a request, and chose prompts with images in another order than the batch's."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    counts = {"preempted": 0, "reordered": 0}

    def preempted(self, *args):
        counts["preempted"] += 1

    def reordered(self, scheduler_output):
        places = [self.input_batch.req_id_to_index[each] for each in scheduler_output.scheduled_encoder_inputs]
        counts["reordered"] += places != sorted(places)

    count_calls(Scheduler, "_preempt_request", preempted)
    count_calls(GPUModelRunner, "_execute_mm_encoder", reordered)
    return counts


def prompt(text, images):
    if not images:
        return {"prompt": text}
    names = {"multi_modal_uuids": {"image": ["one"] * len(images)}} if given.get("one_name") else {}
    pictures = [picture(each, "tiled" in given) for each in images]
    return {"prompt": text, "multi_modal_data": {"image": pictures}, **names}


def staggered(llm, prompts, params):
    """Each request joins two steps after the one before it; lengths differ, so they leave in another order."""
    finished, waiting, steps = {}, list(enumerate(zip(prompts, params))), 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting and steps % 2 == 0:
            index, (each, options) = waiting.pop(0)
            llm.llm_engine.add_request(str(index), each, options)
        for output in llm.llm_engine.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = output
        steps += 1
    return [finished[index] for index in range(len(prompts))]


def compared(expected, done, length, margin):
    """Tokens and log-probabilities, up to where `generate` itself nearly takes another token.

    `gap_off`: how much the two best tokens are further apart, or closer, than in `generate`.
    """
    tokens, scores, gaps = expected
    close = [index for index, gap in enumerate(gaps) if gap < margin]
    end = min(length, *close) if close else length
    got = [float(each[token].logprob) for each, token in zip(done.logprobs, done.token_ids)][:end]
    best = [sorted((float(each.logprob) for each in found.values()), reverse=True) for found in done.logprobs][:end]
    return {
        "expected": tokens[:end],
        "got": list(done.token_ids)[:end],
        "off": max((abs(one - other) for one, other in zip(scores, got)), default=0.0),
        "gap_off": max((abs(each[0] - each[1] - gap) for each, gap in zip(best, gaps)), default=0.0),
        "all": list(done.token_ids),
    }


def loaded(folder, dtype, tiled, bare):
    """The model and the processor that `generate` is called with."""
    from transformers import AutoModelForCausalLM, MllamaForConditionalGeneration, MllamaProcessor

    from hf_xattn import XAttnForConditionalGeneration, XAttnProcessor

    if bare:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), make_processor()
    classes = XAttnForConditionalGeneration, XAttnProcessor
    if tiled in ("mllama", "exported"):
        classes = MllamaForConditionalGeneration, MllamaProcessor
    return classes[0].from_pretrained(folder, dtype=dtype).eval(), classes[1].from_pretrained(folder)


def main():
    import torch
    from vllm import LLM, SamplingParams

    folder, mode = given["folder"], given.get("mode", "together")
    if "model" in given:
        save_model(folder, **given["model"])
    tiled = given.get("tiled")
    if tiled:
        save_tiled(folder, tiled)
    dtype = given.get("engine", {}).get("dtype", "float32")
    model, processor = loaded(folder, getattr(torch, dtype), tiled, given.get("bare"))
    requests = (given.get("requests") or (TILED_REQUESTS if tiled else REQUESTS)) * given.get("repeat", 1)
    longer = [3 * index % 5 if mode == "staggered" else 0 for index in range(len(requests))]
    lengths = [given.get("new_tokens", 10) + each for each in longer]
    # Before the engine: it changes classes of transformers that it runs itself.
    expected = {}
    for request in requests:
        key = json.dumps(request)
        if key not in expected:
            expected[key] = answers(model, processor, [request], max(lengths), bool(tiled))[0]
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    options["gpu_memory_utilization"] = 0.5  # on a CPU, the share of memory that must be free
    counts = watch()
    llm = LLM(folder, **{**options, **given.get("engine", {})})
    params = [SamplingParams(temperature=0, max_tokens=each, ignore_eos=True, logprobs=2) for each in lengths]
    prompts = [prompt(*each) for each in requests]
    if mode == "alone":
        outputs = [llm.generate([each], one, use_tqdm=False)[0] for each, one in zip(prompts, params)]
    elif mode == "staggered":
        outputs = staggered(llm, prompts, params)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [
        compared(expected[json.dumps(request)], output.outputs[0], length, given.get("margin", 0.0))
        for request, length, output in zip(requests, lengths, outputs)
    ]
    print("RESULT " + json.dumps({"rows": rows, **counts}))


if __name__ == "__main__":
    main()
