"""Transformers' OpenAI-compatible server with one model, which is loaded before the server starts.

The server is transformers' own (`transformers.cli.serving`), with changes where the original answers a request wrongly
or not at all. A message that it would read only in part is refused, and so is a request that is too large (413), or
that asks for more than the operator allows (`serving/served_requests.py`). Images are read in a thread, and a broken
image is the client's error (400). An answer ends in front of a stop string, and `/v1/responses` says if it is cut.
Reasoning and tool calls are told apart as for the text model. The model is never unloaded, and `/v1/models` lists it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import (
    BaseHandler,
    GenerateManager,
    GenerationState,
    InferenceThread,
    Modality,
    _GenerationCancelled,
    get_response_template,
)
from transformers.utils import logging

from ..processing.chat_templates import check_template
from ..processing.image_limits import ImageLimits
from ..utils.tensor_checks import type_name
from .cut_answers import with_cut_answer, with_cut_stream
from .request_errors import FAILURE, error_json, told
from .request_limits import InFlight, RequestLimits
from .request_pictures import Pictures, RequestBounds
from .served_requests import (
    AnswerLimits,
    check_answer,
    check_config,
    check_decision,
    check_images_are_read,
    check_instructions,
    check_length,
    check_template_kwargs,
    check_tools,
    image_parts,
    read_whole,
    with_instructions,
)
from .stop_strings import StopAtText, UntilStop, place_of_stop, stops_of
from .stream_ends import asks_for_usage, with_end


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration

logger = logging.get_logger(__name__)

SERVED = ImageLimits(max_pixels=2**26, max_bytes=20 * 2**20, max_seconds=30.0, private_addresses=False)
ANSWERS = AnswerLimits()
REQUESTS = RequestBounds()
SEED = "_seed_of_request"  # of a `GenerationConfig`, until the model answers: other requests may be in front
FULL_IMAGES = 4  # of the largest size: room for these in a request by default
# Fields that transformers' server ignores, at most with a warning in its log, and the values that ask for nothing.
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "presence_penalty": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "functions": (None, []),
    "prediction": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "tool_choice": (None, "auto"),
    "parallel_tool_calls": (None, True),
    "function_call": (None,),
    "top_logprobs": (None, 0),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
IGNORED_COMPLETION_FIELDS: dict[str, tuple[Any, ...]] = {
    "logprobs": (None,),
    "logit_bias": (None, {}),
    "suffix": (None, ""),  # transformers puts it behind the answer, and the model never reads it
}
IGNORED_RESPONSE_FIELDS: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "image": (None,),
    "background": (None, False),
    "include": (None, []),
    "max_tool_calls": (None,),
    "reasoning": (None, {}),
    "text": (None, {}, {"format": {"type": "text"}}),
    "truncation": (None, "disabled"),
}


class OneModel(ModelManager):
    """Holds a loaded model under one name. Never loads or unloads a model."""

    def __init__(
        self,
        name: str,
        model: XAttnForConditionalGeneration,
        processor: Any,
        limits: ImageLimits,
        answers: AnswerLimits,
        requests: RequestBounds,
        max_request_bytes: int,
    ) -> None:
        super().__init__()
        self.limits, self.answers, self.requests, self.max_request_bytes = limits, answers, requests, max_request_bytes
        self.force_model = name  # the server refuses requests for another model
        self.model, self.processor = model, processor
        set_response_template(_tokenizer(processor), model)
        self.created = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Callable | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if model_id_and_revision != self.force_model:
            raise ValueError(f"Expected `model` to be {self.force_model!r}, got {model_id_and_revision!r}.")
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": self.force_model, "cached": True})
        return self.model, self.processor

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # type: ignore[override, unused-ignore]
        return [{"id": self.force_model, "object": "model", "created": self.created, "owned_by": "hf_xattn"}]

    def shutdown(self) -> None:
        """Keeps the model: the server cannot answer without it."""


class _Worded(BaseHandler):
    """Tells the client why a request has failed."""

    async def handle_request(self, body: dict, request_id: str) -> Any:
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except HTTPException:
            raise
        except Exception as error:
            raise HTTPException(*told(error)) from error


class _Ended(BaseHandler):
    """Ends streams as the OpenAI API does."""

    async def handle_request(self, body: dict, request_id: str) -> Any:
        usage = asks_for_usage(body)
        body = {name: value for name, value in body.items() if name != "stream_options"}
        answer = await super().handle_request(body, request_id)  # type: ignore[misc]
        return with_end(answer, usage, error_json) if isinstance(answer, StreamingResponse) else answer


class _Bounded(BaseHandler):
    """Refuses requests for what the server would ignore, and for more than its operator allows."""

    ignored: dict[str, tuple[Any, ...]] = {}  # of the endpoint

    async def handle_request(self, body: dict, request_id: str) -> Any:
        for name, values in (IGNORED_FIELDS | self.ignored).items():
            if body.get(name) not in values:
                raise HTTPException(
                    400, f"Expected `{name}` to be {values[-1]!r}, the only supported value, got {body[name]!r}."
                )
        manager: Any = self.model_manager
        body = check_answer(body, manager.answers, manager.model)
        return await super().handle_request(body, request_id)  # type: ignore[misc]

    def _build_generation_config(self, body: dict, model_generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        config = super()._build_generation_config({**body, "seed": None}, model_generation_config, *args, **kwargs)
        manager: Any = self.model_manager
        check_config(config, body, manager.answers, model_generation_config)
        setattr(config, SEED, body.get("seed"))
        return config


class _Checked(BaseHandler):
    """Refuses requests that the server would read only in part, and opens images before the server does."""

    async def handle_request(self, body: dict, request_id: str) -> Any:
        manager: Any = self.model_manager
        check_instructions(body)
        check_template_kwargs(body, manager.processor)
        check_tools(body, manager.processor)
        field = "input" if isinstance(self, ResponseHandler) else "messages"
        parts = list(image_parts(body.get(field), field))
        if parts and manager.get_model_modality(manager.model, manager.processor) is Modality.LLM:
            raise HTTPException(
                400, f"{manager.force_model} cannot read images: it was saved without an image processor."
            )
        image_processor = getattr(manager.processor, "image_processor", None)
        pictures = Pictures(parts, image_processor, manager.limits, manager.requests)
        await pictures.open(manager.max_request_bytes)
        return await super().handle_request(body, request_id, pictures.unpack)  # type: ignore[misc]

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict], modality: Modality) -> list[dict]:
        def read(message: dict) -> dict:
            return BaseHandler.get_processor_inputs_from_messages([message], modality)[0]

        return check_images_are_read([read_whole(message, read) for message in messages])


class _Prepared(BaseHandler):
    """Unpacks images, resizes them, and tokenizes text in a thread, where they do not delay other requests.

    Requests are prepared one after another, so that the pixels of one alone are in memory. Answers begin in the event
    loop: `_streaming` and `_non_streaming` return what begins them there.
    """

    async def handle_request(self, body: dict, request_id: str, unpack: Callable[[], None] = lambda: None) -> Any:
        handle = super().handle_request  # type: ignore[misc]

        def prepare() -> Any:
            unpack()
            return asyncio.run(handle(body, request_id))

        state: Any = self.generation_state
        return await (await state.preparing.async_submit(prepare))()

    def _streaming(self, *args: Any, **kwargs: Any) -> Any:
        stream = super()._streaming  # type: ignore[misc]

        async def begin() -> Any:
            return stream(*args, **kwargs)

        return begin

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        return functools.partial(super()._non_streaming, *args, **kwargs)  # type: ignore[misc]


class _Generation(GenerateManager):
    """Ends answers in front of stop strings, gives the manager a tokenizer, and keeps line breaks out of its stream."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check_length(model, inputs["input_ids"].shape[1], gen_config)
        stopping: Any = _Stopping(model, processor, gen_config, one_line=True)
        queue, streamer = super().generate_streaming(stopping, stopping.tokenizer, inputs, gen_config, *args, **kwargs)
        return UntilStop(queue, stopping.stops) if stopping.stops else queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check_length(model, inputs["input_ids"].shape[1], gen_config)
        stopping: Any = _Stopping(model, processor, gen_config)
        tokenizer, stops = stopping.tokenizer, stopping.stops
        text, length, ids = await super().generate_non_streaming(
            stopping, tokenizer, inputs, gen_config, *args, **kwargs
        )
        if get_response_template(tokenizer, model) is not None:  # the server reads the ids again
            raw = tokenizer.decode(ids, skip_special_tokens=False)
            if (place := place_of_stop(raw, stops)) is not None:
                ids = tokenizer(raw[:place], add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return text[: place_of_stop(text, stops)], length, ids


class _Stopping:
    """Wraps a model, so that it stops at texts, draws from the seed of the request, and puts its error messages on one
    line, escaped for a JSON string.

    Takes the stop strings out of the configuration: transformers would look for them too.
    """

    def __init__(self, model: Any, processor: Any, config: Any, one_line: bool = False) -> None:
        self.model, self.tokenizer, self.one_line = model, _tokenizer(processor), one_line
        self.stops = stops_of(config, model.generation_config)
        config.stop_strings = None
        self.seed = vars(config).pop(SEED, None)

    def generate(self, **kwargs: Any) -> Any:
        if self.seed is None:
            return self._generated(kwargs)
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # later requests draw on as before
            torch.manual_seed(self.seed)
            return self._generated(kwargs)

    def _generated(self, kwargs: dict[str, Any]) -> Any:
        if self.stops:
            length = kwargs["input_ids"].shape[1]
            kwargs["stopping_criteria"] = StoppingCriteriaList([StopAtText(self.tokenizer, self.stops, length)])
        if not self.one_line:
            return self.model.generate(**kwargs)
        try:
            return self.model.generate(**kwargs)
        except _GenerationCancelled:
            raise
        except Exception as error:
            raise RuntimeError(json.dumps(told(error)[1])[1:-1]) from error


class _State(GenerationState):
    """Uses one thread for the model, so that requests are answered one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.manager, self.preparing = _Generation(), InferenceThread()

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Generation:
        return self.manager


class _Chat(_Worded, _Ended, _Bounded, _Checked, _Prepared, ChatCompletionHandler):  # type: ignore[misc]
    pass


class _Completion(_Worded, _Ended, _Bounded, _Prepared, CompletionHandler):  # type: ignore[misc]
    ignored = IGNORED_COMPLETION_FIELDS


class _WholeResponses(ResponseHandler):
    """Says if an answer is cut, and keeps a system message beside instructions."""

    @staticmethod
    def _normalize_input(body: dict) -> list[dict]:
        messages = ResponseHandler._normalize_input({**body, "instructions": None})
        return with_instructions(messages, body.get("instructions"))

    async def handle_request(self, body: dict, request_id: str) -> Any:
        stream = body.get("stream")  # the default of the OpenAI API is False
        return await super().handle_request({**body, "stream": False if stream is None else stream}, request_id)

    def _streaming(self, *args: Any, **kwargs: Any) -> Any:
        return with_cut_stream(super()._streaming(*args, **kwargs), _limit_of(args, kwargs))

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        return with_cut_answer(await super()._non_streaming(*args, **kwargs), _limit_of(args, kwargs))


class _Responses(_Worded, _Bounded, _Checked, _Prepared, _WholeResponses):  # type: ignore[misc]
    ignored = IGNORED_RESPONSE_FIELDS


def _limit_of(args: Any, kwargs: Any) -> int:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, GenerationConfig)).max_new_tokens


def _newer_handlers(manager: OneModel, state: GenerationState) -> dict[str, Any]:
    """The handler of an endpoint that came with transformers 5.20."""
    try:
        from transformers.cli.serving.systemone import SystemOneHandler
    except ImportError:
        return {}

    class Decisions(_Worded, SystemOneHandler):
        async def handle_request(self, body: dict, request_id: str) -> Any:
            check_decision(body)
            check_template_kwargs(body, manager.processor)
            return await super().handle_request(body, request_id)

    return {"systemone_handler": Decisions(manager, state)}


def room_for_images(limits: ImageLimits) -> int:
    """The default limit of a request: bytes of four images of the largest size in base64, and a mebibyte of text."""
    return FULL_IMAGES * (limits.max_bytes * 4 // 3) + 2**20


def build_app(
    name: str,
    model: XAttnForConditionalGeneration,
    processor: Any,
    limits: ImageLimits = SERVED,
    max_request_bytes: int | None = None,
    answers: AnswerLimits = ANSWERS,
    requests: RequestBounds = REQUESTS,
) -> FastAPI:
    """Builds transformers' server for a loaded model.

    Args:
        name (`str`): of the model, for clients.
        limits ([`ImageLimits`]): of the images that clients name. By default none is fetched from a private network.
        max_request_bytes (`int`, *optional*): of the body of a request. By default [`room_for_images`].
        answers ([`AnswerLimits`]): of what clients ask of `generate`.
        requests ([`RequestBounds`]): of the images of a request, and of requests at the same time.
    """
    most = room_for_images(limits) if max_request_bytes is None else max_request_bytes
    manager, state = OneModel(name, model, processor, limits, answers, requests, most), _State()
    app = build_server(
        manager,
        _Chat(manager, state),
        completion_handler=_Completion(manager, state),
        response_handler=_Responses(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        **_newer_handlers(manager, state),
        generation_state=state,
    )
    app.add_middleware(
        RequestLimits,
        most=most,
        remedy="Send fewer or smaller images, or raise the limit of the server: `hf-xattn serve --max-request-mib`.",
        error=error_json,
    )
    app.add_middleware(  # the outer one: bodies that are read count too
        InFlight,
        most=requests.max_requests,
        remedy="The operator sets another number with `hf-xattn serve --max-requests`.",
        error=error_json,
    )

    @app.exception_handler(AnyHTTPException)  # also of the router, for an unknown address
    async def refused(request: Request, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse(error_json(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)  # of an endpoint that is transformers' alone
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_json(500, FAILURE), 500)

    @app.exception_handler(RequestValidationError)
    async def no_request(request: Request, error: RequestValidationError) -> JSONResponse:
        why = "; ".join(f"{each['msg']} {each.get('ctx', {}).get('error', '')}".strip() for each in error.errors()[:3])
        return JSONResponse(error_json(400, f"Expected the body of the request to be a JSON object: {why[:200]}"), 400)

    return app


def _tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def set_response_template(tokenizer: Any, model: XAttnForConditionalGeneration) -> None:
    """Gives a tokenizer the form of reasoning and tool calls that transformers knows for the text model.

    Transformers' server looks it up by the `model_type`, here "xattn", and would send both as text of the answer. A
    tokenizer of another family, without the token that begins an answer, keeps its answers as they are.
    """
    text_model: Any = SimpleNamespace(config=model.config.get_text_config())
    template: Any = get_response_template(tokenizer, text_model)
    if template is None or getattr(tokenizer, "response_template", None) is not None:
        return
    anchors = template["start_anchor"]
    anchor = anchors if isinstance(anchors, str) else anchors[0]
    if anchor.partition(">")[0] + ">" in tokenizer.get_vocab():
        tokenizer.response_template = template


def check_answers(name: str, processor: Any) -> None:
    """Raises a `ValueError` if every request would fail: for a slow tokenizer, or no chat template."""
    tokenizer = _tokenizer(processor)
    if not hasattr(tokenizer, "_tokenizer"):
        raise ValueError(f"Expected {name} to have a fast tokenizer for serving, got a {type_name(tokenizer)}.")
    check_template(processor)


class Server(uvicorn.Server):
    """Calls `ready` when it accepts requests. At Ctrl-C, running requests have five seconds to finish."""

    def __init__(self, app: FastAPI, ready: Callable[[], None], log_level: str = "info") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=5))
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()
