"""Pictures in every form that users have them: the same pixels."""

import base64
import io
import random
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import CLIPImageProcessor, SiglipImageProcessorPil, ViTImageProcessor

from helpers.inputs.bounded_memory import png
from helpers.inputs.chat_templates import TEXT_TEMPLATES, make_processor
from helpers.inputs.damaged_checkpoints import is_ours
from helpers.models.word_models import make_picture, make_text_checkpoint
from hf_xattn import XAttnProcessor
from hf_xattn.processing.image_limits import LIMITS
from hf_xattn.processing.image_reading import read_frames, read_image


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make_text_checkpoint(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module", params=[SiglipImageProcessorPil, ViTImageProcessor])
def processor(request, tokenizer):
    """ViT's image processor converts nothing to RGB by itself."""
    return XAttnProcessor(request.param(size={"height": 32, "width": 32}), tokenizer)


def picture():
    """Not square: a picture on its side is another one."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8))


def as_file(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_form_gives_the_same_pixels(processor, tmp_path):
    """A path that is refused, an array on its side, an alpha channel that is taken for a colour."""
    image = picture()
    expected = processor(images=image)["pixel_values"]
    array = np.asarray(image)
    file = tmp_path / "a.png"
    file.write_bytes(as_file(image))
    encoded = base64.b64encode(as_file(image)).decode()
    opaque = image.convert("RGBA")
    forms = [
        file,
        str(file),
        encoded,
        f"data:image/png;base64,{encoded}",
        array,
        array.transpose(2, 0, 1),
        array.astype(np.int64),
        array.astype(np.uint32),
        array.astype(np.uint64),
        torch.from_numpy(array.astype(np.uint16)),
        array.astype(np.float64),
        torch.from_numpy(array.copy()),
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        torch.from_numpy(array.copy()).float(),
        array[None],
        opaque,
        np.asarray(opaque),
        torch.from_numpy(np.asarray(opaque).copy()).permute(2, 0, 1),
        np.asarray(opaque).astype(np.float32),
    ]
    for form in forms:
        made = processor(images=form)["pixel_values"]
        assert made.shape == expected.shape and torch.allclose(made, expected, atol=1e-4), repr(form)[:80]
    mixed = processor(images=[[form] for form in forms])["pixel_values"]
    assert torch.allclose(mixed, expected.expand_as(mixed), atol=1e-4)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "PA", "1", "CMYK", "YCbCr", "HSV", "RGBA", "I;16"])
def test_every_mode_of_pil_gives_the_same_colours(processor, mode):
    """A palette's indices taken for colours; 16 bits that turn white."""
    if mode == "I;16":
        grey = np.asarray(picture().convert("L"))
        image, plain = Image.fromarray(grey.astype(np.uint16) * 257), Image.fromarray(grey)
        assert image.mode == "I;16"
    else:
        plain = image = picture().convert("L" if mode == "LA" else "P" if mode == "PA" else "RGB").convert(mode)
    expected = processor(images=plain.convert("RGB"))["pixel_values"]
    assert torch.equal(processor(images=image)["pixel_values"], expected)


def test_grey_arrays_become_three_equal_channels(processor):
    """A grey array that is refused, or whose one channel is broadcast in a batch of colours."""
    grey = picture().convert("L")
    array = np.asarray(grey)
    expected = processor(images=grey.convert("RGB"))["pixel_values"]
    for form in (array, array[None], array[..., None], torch.from_numpy(array.copy())):
        assert torch.equal(processor(images=[form])["pixel_values"], expected)
    both = processor(images=[array, picture()], text=["a", "dog"])["pixel_values"]
    assert torch.equal(both[0], expected[0])


def test_transparent_becomes_white(processor, tmp_path):
    """Colours that nobody sees, where the picture is transparent."""
    rgba = np.zeros((24, 40, 4), dtype=np.uint8)
    rgba[:, 20:] = (255, 0, 0, 255)
    rgba[:, :5] = (0, 255, 0, 128)
    image = Image.fromarray(rgba)
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    expected = processor(images=white)["pixel_values"]
    palette = image.convert("RGB").convert("P")
    file = tmp_path / "a.png"
    image.save(file)
    for form in (image, rgba, torch.from_numpy(rgba), file, torch.from_numpy(rgba / 1.0)):
        made = processor(images=form)["pixel_values"]
        assert torch.allclose(made, expected, atol=0.02), type(form)
    palette.putpixel((0, 0), 0)
    palette.info["transparency"] = palette.getpixel((39, 0))
    assert read_image(palette).getpixel((39, 0)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_photographs_stand_upright(processor, tmp_path, orientation):
    """A photograph that the camera saved on its side."""
    image = picture()
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = Image.open(io.BytesIO(as_file(image, exif=exif)))
    back = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_270],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_90],
    }[orientation]
    upright = image
    for step in back:
        upright = upright.transpose(step)
    assert torch.equal(processor(images=lying)["pixel_values"], processor(images=upright)["pixel_values"])


def test_opacity_of_arrays(processor):
    """Colours up to 255 with an opacity of 0 or 1, which is read as almost transparent; RGBA that goes a little above
    1, as resizing leaves it, which is read as up to 255.
    """
    rgba = np.full((24, 40, 4), 90.0)
    rgba[..., 3] = 1
    with pytest.raises(ValueError, match="opacity .* in 0..255, as its colours, got values up to 1"):
        processor(images=rgba)
    unit = torch.rand(4, 24, 40, generator=torch.Generator().manual_seed(0))
    unit[3] = 1
    made = read_image(unit, rescale=False)
    assert torch.allclose(made, unit[:3])
    unit[:, 0, 0] = 1.04
    assert torch.allclose(read_image(unit, rescale=False)[:, 1:], unit[:3, 1:])


def test_pixels_as_they_are_stand_upright(processor):
    """`do_convert_rgb=False`, with which a photograph stays on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = Image.open(io.BytesIO(as_file(picture(), exif=exif)))
    made = processor(images=lying, do_convert_rgb=False)["pixel_values"]
    upright = picture().transpose(Image.Transpose.ROTATE_270)
    assert torch.equal(made, processor(images=upright, do_convert_rgb=False)["pixel_values"])


def test_a_transparent_value_of_16_bits():
    """A value that the file names as transparent, drawn in its grey."""
    values = np.full((24, 40), 30_000, dtype=np.uint16)
    values[:, :20] = 10_000
    image = Image.open(io.BytesIO(as_file(Image.fromarray(values), transparency=10_000)))
    assert image.mode == "I;16" and image.info["transparency"] == 10_000
    read = read_image(image)
    assert read.getpixel((0, 0)) == (255, 255, 255) and read.getpixel((39, 0)) == (30_000 // 257,) * 3


def test_data_url_with_percent_signs(processor):
    """`+`, `/` and `=` as a browser writes them into an address."""
    encoded = base64.b64encode(as_file(picture())).decode()
    address = "data:image/png;base64," + encoded.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    assert "%2B" in address and "%2F" in address
    assert torch.equal(processor(images=address)["pixel_values"], processor(images=picture())["pixel_values"])


def test_base64_longer_than_a_file_name(processor):
    """Base64 that is taken for a path, for which the system has no room."""
    image = Image.new("RGB", (24, 40), (10, 20, 30))
    buffer = as_file(image) + b"\0" * 600
    encoded = base64.b64encode(buffer).decode()
    assert 255 < len(encoded) < 4096 and len(encoded.rpartition("/")[2]) > 255
    assert torch.equal(processor(images=encoded)["pixel_values"], processor(images=image)["pixel_values"])


def test_a_file_address_is_read_as_a_file(processor, tmp_path):
    """A `file://` address that is refused as no URL."""
    make_picture().save(tmp_path / "a b.png")
    made = processor(images=(tmp_path / "a b.png").as_uri())["pixel_values"]
    assert torch.equal(made, processor(images=make_picture())["pixel_values"])


@pytest.mark.parametrize("kind", ["tensor", "array", "frames", "white", "chat"])
def test_values_in_0_to_1(kind, processor):
    """A tensor in 0..1, as torchvision makes it, that becomes an almost black picture."""
    image = picture() if kind != "white" else Image.new("RGB", (32, 32), "white")
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
    expected = processor(images=image)["pixel_values"]
    for options in ({"do_rescale": False}, {"images_kwargs": {"do_rescale": False}}):
        made = processor(images=tensor, text="a", **options)["pixel_values"]
        assert torch.allclose(made, expected, atol=0.02)
    with pytest.raises(ValueError, match="to be in 0..255, got an array of .*almost black. Pass `do_rescale=False`"):
        if kind == "frames":
            processor(videos=torch.stack([tensor] * 2), text="a")
        elif kind == "chat":
            part = {"type": "image", "image": tensor}
            processor.apply_chat_template([{"role": "user", "content": [part]}], tokenize=True)
        else:
            processor(images=tensor.numpy() if kind == "array" else tensor, text="a")
    black = torch.zeros(3, 32, 32)
    assert torch.equal(
        processor(images=black)["pixel_values"], processor(images=Image.new("RGB", (32, 32)))["pixel_values"]
    )


@pytest.mark.parametrize("kind", ["pil", "uint8", "path"])
def test_do_rescale_for_values_up_to_255(processor, kind, tmp_path):
    """Values 255 times too large, without a word: a wrong answer."""
    image = picture()
    image.save(tmp_path / "a.png")
    given = {"pil": image, "uint8": np.asarray(image), "path": tmp_path / "a.png"}[kind]
    with pytest.raises(ValueError, match="values from 0 to 1 for `do_rescale=False`, got .*leave `do_rescale` out"):
        processor(images=given, text="a", do_rescale=False)


def test_size_of_a_call(processor):
    """`size=` that changes nothing."""
    image = make_picture()
    size = {"height": 16, "width": 24}
    flat = processor(images=image, text="a", size=size)["pixel_values"]
    assert flat.shape[-2:] == (16, 24)
    assert torch.equal(processor(images=image, text="a", images_kwargs={"size": size})["pixel_values"], flat)
    plain = processor(images=image, do_normalize=False, do_rescale=False, do_resize=False)["pixel_values"]
    assert torch.equal(plain[0, 0], torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1))


def test_an_image_of_three_columns_is_no_image_of_channels(processor):
    """Three columns taken for three channels, in a batch or alone."""
    array = np.random.default_rng(1).integers(0, 255, (3, 9, 3), dtype=np.uint8)
    expected = processor(images=Image.fromarray(array))["pixel_values"]
    made = processor(images=array, input_data_format="channels_last")["pixel_values"]
    assert torch.equal(made, expected)


def test_frames_of_videos(processor):
    """A video of which one frame is seen, or whose frames end in another sample."""
    frames = [make_picture(seed) for seed in range(5)]
    array = np.stack([np.asarray(frame) for frame in frames])
    expected = processor(images=frames, text="a")["pixel_values"]
    for video in (frames, array, array.transpose(0, 3, 1, 2), torch.from_numpy(array), [frames], array[None]):
        assert torch.equal(processor(videos=video, text="a")["pixel_values"], expected)
    assert torch.equal(processor(images=frames[:2], videos=frames[2:], text="a")["pixel_values"], expected)
    batch = processor(videos=[array[:2], [array[2:], array[:1]], None], text=["a", "dog", "a"])
    assert batch["image_mask"].sum(1).tolist() == [2, 4, 0]
    assert torch.equal(batch["pixel_values"][1, :3], expected[0, 2:])
    few = processor(videos=array, text="a", num_frames=3)["pixel_values"]
    assert torch.equal(few, expected[:, [0, 2, 4]])
    assert torch.equal(processor(videos=array, text="a", videos_kwargs={"num_frames": 3})["pixel_values"], few)
    with pytest.raises(ValueError, match="`videos` to have one entry for each text, got 1 entries for 2 texts"):
        processor(videos=[array], text=["a", "dog"])
    with pytest.raises(ValueError, match="no frames"):
        read_frames(array[:0])
    with pytest.raises(ValueError, match="`num_frames`.*got 0"):
        read_frames(array, num_frames=0)
    with pytest.raises(ValueError, match="`fps` needs a video file"):
        read_frames(array, fps=1.0)
    with pytest.raises(ValueError, match="no/such.mp4.*neither"):
        read_frames("no/such.mp4")


def test_video_file_without_a_decoder(processor, tmp_path, monkeypatch):
    """A file whose frames are silently not there."""
    import transformers.video_utils

    monkeypatch.setattr(transformers.video_utils, "is_av_available", lambda: False)
    (tmp_path / "a.mp4").write_bytes(b"x")
    with pytest.raises(ImportError, match="pip install av"):
        processor(videos=[tmp_path / "a.mp4"], text="a")


def test_what_is_no_image(processor, tmp_path):
    """A broken picture that is read as far as it goes, or values that are no pixels."""
    whole = as_file(make_picture())
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    wrong = {
        "cannot be read": tmp_path / "cut.png",
        "text.png.*cannot be read as an image": tmp_path / "text.png",
        "missing.png.*cannot be read": tmp_path / "missing.png",
        "missing.png.*no such file": "missing.png",
        "0..255, got 0..300": np.full((4, 4, 3), 300),
        "0..255, got values from -1": np.array([[[-1.0, 1.0, 0.0]]]),
        "1, 3 or 4 channels": np.zeros((5, 5, 5), dtype=np.uint8),
        "got shape .0, 5, 3": np.zeros((0, 5, 3), dtype=np.uint8),
        "mode 'F'": Image.new("F", (4, 4)),
        r"\(10000 characters\)": "A" * 10_000,
    }
    for message, image in wrong.items():
        if message.endswith("300"):
            image = image.copy()
            image[0] = 0
        with pytest.raises(ValueError, match=f"`images`.*{message}"):
            processor(images=image, text="a")


def test_an_error_page_is_no_image(processor):
    """An error page of a server taken for a picture."""
    import http.server
    import threading

    body = as_file(picture())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        expected = processor(images=picture())["pixel_values"]
        assert torch.equal(processor(images=f"{url}/a.png")["pixel_values"], expected)
        with pytest.raises(ValueError, match="`images`.*cannot be read.*404"):
            processor(images=f"{url}/b.png")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_broken_exif_beside_an_orientation(orientation, processor):
    """A photograph that every viewer shows upright, refused because another tag of its EXIF is damaged."""
    image, exif = picture(), Image.Exif()
    exif[0x0112], exif[0x010F] = orientation, "Maker"
    whole = as_file(image, "JPEG", quality=95, exif=exif.tobytes())
    expected = processor(images=ImageOps.exif_transpose(Image.open(io.BytesIO(whole))))["pixel_values"]
    block = bytearray(exif.tobytes())
    place = block.index(bytes([0x01, 0x0F])) + 2
    block += bytes(64)  # so that nothing reads behind the end
    failed = 0
    for kind in (3, 4, 5, 10, 11, 12):  # numbers where a text stands
        block[place : place + 2] = bytes([0, kind])
        broken = as_file(image, "JPEG", quality=95, exif=bytes(block))
        try:
            ImageOps.exif_transpose(Image.open(io.BytesIO(broken)))
        except Exception:
            failed += 1
        for given in (broken, Image.open(io.BytesIO(broken)), read_image(broken)):
            assert torch.equal(processor(images=given)["pixel_values"], expected)
        plain = processor(images=Image.open(io.BytesIO(broken)), do_convert_rgb=False)["pixel_values"]
        assert torch.equal(plain, expected)
    assert failed or orientation == 1
    garbage = as_file(image, "JPEG", quality=95, exif=b"Exif\0\0no header at all")
    assert torch.equal(
        processor(images=garbage)["pixel_values"], processor(images=as_file(image, "JPEG", quality=95))["pixel_values"]
    )


def picture_file(side=24):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8))


def pictures():
    """Broken files, seeded: (name, bytes)."""
    generator = random.Random(3)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "TGA", "ICO"):
        buffer = io.BytesIO()
        picture_file().save(buffer, kind)
        whole = buffer.getvalue()
        for size in (0, 3, 20, len(whole) // 2):
            yield f"{kind} of {size} bytes", whole[:size]
        for _ in range(12):
            data = bytearray(whole)
            for _ in range(3):
                data[generator.randrange(min(len(data), 200))] ^= 1 << generator.randrange(8)
            yield f"{kind} with other bits {generator.random()}", bytes(data)
    yield "a PNG of 10^10 pixels", png(100_000, 100_000)
    yield "a PNG of no pixels", png(0, 5)
    yield "a PNG of 2^31 columns", png(2**31 - 1, 2**31 - 1)
    yield "an EPS file", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) print\n"
    yield "an SVG file", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    yield (
        "a TIFF of 2^32 columns",
        b"II*\0" + struct.pack("<IHHHIIHHII", 8, 2, 256, 4, 1, 2**32 - 1, 257, 4, 1, 2**32 - 1),
    )


def test_broken_images_are_refused_by_name(tmp_path):
    """An error of a decoder, which names no argument, or gigabytes for a few bytes."""
    wrong, refused, read = {}, 0, 0
    for name, content in pictures():
        (tmp_path / "a.png").write_bytes(content)
        data = "data:image/png;base64," + base64.b64encode(content).decode()
        for source in (tmp_path / "a.png", data):
            try:
                image = read_image(source)
            except Exception as error:
                refused += 1
                if not (is_ours(error) and "`images`" in str(error)):
                    wrong[name] = f"{type(error).__name__}: {error}"
            else:
                read += 1
                if image.mode != "RGB" or image.width * image.height > LIMITS.max_pixels:
                    wrong[name] = f"{image.mode} of {image.size}"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
    assert refused >= 100 and read, "bits of the values of a picture_file cannot be told from others"


def test_limits_of_pictures(monkeypatch, tmp_path):
    """A limit that only the largest pictures meet, or that cannot be changed."""
    picture_file(64).save(tmp_path / "a.png")
    processor = make_processor(TEXT_TEMPLATES["guard"])
    processor(images=picture_file(64), text="a")
    monkeypatch.setattr(LIMITS, "max_pixels", 100)
    with pytest.raises(ValueError, match="at most 100 pixels"):
        processor(images=picture_file(64), text="a")
    for source in (tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), picture_file(64)):
        with pytest.raises(ValueError, match="`images` holds an image of 64 x 64 pixels: expected at most 100"):
            read_image(source)
    with pytest.raises(ValueError, match="no such file"):
        read_image("a\0b")


@pytest.mark.parametrize("as_array", [False, True], ids=["a file", "an array"])
@pytest.mark.parametrize("rgb", [True, False])
def test_a_picture_that_becomes_long(as_array, rgb):
    """One of 20,000 pixels, of which an image processor that sets the shortest edge makes a billion."""
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = XAttnProcessor(images, make_processor(TEXT_TEMPLATES["guard"]).tokenizer)
    narrow = Image.new("RGB", (1, 200_000))
    given = np.array(narrow) if as_array and rgb else narrow
    with pytest.raises(ValueError, match="would make 204800000 pixels: expected at most"):
        processor(images=given, text="a", do_convert_rgb=rgb)
    assert processor(images=narrow, text="a", size={"height": 32, "width": 32})["pixel_values"].shape[-1] == 32
    assert processor(images=Image.new("RGB", (1, 200)), text="a")["pixel_values"].shape[-1] == 32
