"""Image files of every kind a server meets, honest and hostile, by name."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageDraw

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, colour, rows: bytes, before: bytes = b"", after: bytes = b"", interlaced=0):
    """A PNG by hand; ``rows`` are the raw bytes, filters included."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    body = chunk(b"IHDR", header) + before + chunk(b"IDAT", zlib.compress(rows)) + after
    return SIGNATURE + body + chunk(b"IEND", b"")


def flat_png(side: int, seed: int = 0) -> bytes:
    """A half-transparent PNG of ``side * side`` pixels in few bytes."""
    packer = zlib.compressobj(6)
    row = b"\0" + bytes([seed % 256, 100, 200, 128]) * side
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def photo(size=(61, 43)) -> Image.Image:
    """Smooth shades and hard edges, different in every corner."""
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    image = Image.fromarray(np.stack([x * 4 % 256, y * 5 % 256, (x + y) * 2 % 256], -1).astype(np.uint8))
    ImageDraw.Draw(image).rectangle((3, 5, 20, 12), fill=(250, 10, 30))
    return image


def saved(image: Image.Image, format: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def turned(orientation: int, format: str, mode: str = "RGB") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(photo().convert(mode), format, exif=exif)


def many_scans(size, count: int) -> bytes:
    """A progressive JPEG whose last scan is there again and again: few bytes, and each goes over all of the image."""
    data = saved(Image.new("L", size, 90), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def two_headers() -> bytes:
    """A PNG that says it is small, and then that it is not."""
    big = struct.pack(">IIBBBBB", 3000, 3000, 8, 0, 0, 0, 0)
    small = struct.pack(">IIBBBBB", 10, 10, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 3001 * 3000)
    body = chunk(b"IHDR", small) + chunk(b"IHDR", big) + chunk(b"IDAT", rows)
    return SIGNATURE + body + chunk(b"IEND", b"")


def _modes() -> dict[str, bytes]:
    image, found = photo(), {}
    layer = image.copy()
    layer.putalpha(Image.linear_gradient("L").resize(image.size))
    for mode in ("1", "L", "P", "RGB"):
        found[f"png {mode}"] = saved(image.convert(mode), "PNG")
        found[f"bmp {mode}"] = saved(image.convert(mode), "BMP")
    for mode in ("LA", "RGBA"):
        found[f"png {mode}"] = saved(layer.convert(mode), "PNG")
    found["bmp RGBA"] = saved(layer, "BMP")
    found["png P with a transparent colour"] = saved(image.convert("P"), "PNG", transparency=3)
    found["png P with alpha"] = saved(
        image.quantize(9), "PNG", transparency=bytes([0, 90, 200, 255, 10, 0, 1, 2, 3])
    )
    for bits in (1, 2, 4):
        few = image.quantize(1 << bits)
        found[f"png P {bits} bits"] = saved(few, "PNG", bits=bits)
        found[f"png P {bits} bits with a transparent colour"] = saved(few, "PNG", bits=bits, transparency=1)
        found[f"png P {bits} bits with alpha"] = saved(few, "PNG", bits=bits, transparency=bytes([90, 200]))
    found["png RGB with a transparent colour"] = saved(image, "PNG", transparency=(250, 10, 30))
    found["png L with a transparent shade"] = saved(image.convert("L"), "PNG", transparency=90)
    shades = np.arange(61 * 43, dtype=np.uint16).reshape(43, 61) * 20
    found["png 16 bits"] = saved(Image.fromarray(shades), "PNG")
    rows = b"".join(b"\0" + shades[y].astype(">u2").repeat(3).tobytes() for y in range(43))
    found["png RGB 16 bits"] = png(61, 43, 16, 2, rows)
    rows = b"".join(b"\0" + shades[y].astype(">u2").repeat(2).tobytes() for y in range(43))
    found["png LA 16 bits"] = png(61, 43, 16, 4, rows)
    found["png interlaced"] = png(1, 1, 8, 2, b"\0\x10\x80\xf0", interlaced=1)
    found["webp"], found["webp RGBA"] = saved(image, "WEBP"), saved(layer, "WEBP")
    found["webp lossless"] = saved(layer, "WEBP", lossless=True)
    found["gif"] = saved(image.convert("P"), "GIF")
    for mode in ("1", "L", "P", "RGB", "CMYK"):
        found[f"tiff {mode}"] = saved(image.convert(mode), "TIFF", compression="tiff_deflate")
    found["tiff RGBA"], found["tiff 16 bits"] = saved(layer, "TIFF"), saved(Image.fromarray(shades), "TIFF")
    found["tiff of two pages"] = saved(image, "TIFF", save_all=True, append_images=[photo((9, 9))])
    found["avif"], found["avif RGBA"] = saved(image, "AVIF"), saved(layer, "AVIF", quality=90)
    found["jpeg"], found["jpeg L"] = saved(image, "JPEG"), saved(image.convert("L"), "JPEG")
    found["jpeg CMYK"] = saved(image.convert("CMYK"), "JPEG")
    found["jpeg CMYK progressive"] = saved(image.convert("CMYK"), "JPEG", progressive=True)
    found["jpeg progressive"] = saved(image, "JPEG", progressive=True, subsampling=0)
    found["jpeg with a second picture"] = saved(image, "MPO", save_all=True, append_images=[photo((9, 9))])
    found["one pixel"] = saved(Image.new("RGB", (1, 1), "red"), "PNG")
    found["wider than a strip"] = saved(photo((600, 3)), "PNG")
    return found


def _shades() -> dict[str, tuple[bytes, np.ndarray]]:
    """PNGs of every depth without alpha, each without and with a transparent colour, and their pixels in RGBA."""
    found, x, y = {}, *np.meshgrid(np.arange(17), np.arange(11))
    for colour, channels in ((0, 1), (2, 3)):
        for depth in (1, 2, 4, 8, 16) if colour == 0 else (8, 16):
            most = (1 << depth) - 1
            samples = np.stack([(x * 1009 + y * 263 * (i + 1)) & most for i in range(channels)], -1)
            bits = (samples[..., None] >> np.arange(depth)[::-1] & 1).reshape(11, -1).astype(np.uint8)
            rows = b"".join(b"\0" + row.tobytes() for row in np.packbits(bits, 1))
            eight = samples >> 8 if depth == 16 else samples * (255 // most)
            for key in (None, samples[4, 7]):
                seen = np.ones((11, 17, 1)) if key is None else (samples != key).any(-1, keepdims=True)
                before = b"" if key is None else chunk(b"tRNS", key.astype(">u2").tobytes())
                name = f"{'grey' if colour == 0 else 'RGB'} {depth} bits, {'opaque' if key is None else 'transparent'}"
                whole = np.concatenate([eight.repeat(3 // channels, -1), 255 * seen], -1).astype(np.uint8)
                found[name] = png(17, 11, depth, colour, rows, before), whole
    return found


SHADES = _shades()


def _turned() -> dict[str, bytes]:
    found = {f"jpeg turned {i}": turned(i, "JPEG") for i in range(10)}
    found |= {f"png turned {i}": turned(i, "PNG", "P") for i in range(1, 9)}
    found |= {
        f"{kind} turned {i}": turned(i, kind.upper()) for kind in ("webp", "tiff", "avif") for i in (3, 6)
    }
    return found


def _hostile() -> dict[str, bytes]:
    plain, frames = saved(photo(), "PNG"), [photo(), photo().rotate(180), photo().rotate(90)]
    more = {"save_all": True, "append_images": frames[1:]}
    bomb = zlib.compress(b"A" * 30_000_000, 9)
    found = {f"animated {f}": saved(frames[0], f, **more) for f in ("PNG", "WEBP", "GIF")}
    for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF"):
        whole = saved(photo(), format)
        found |= {f"half of a {format}": whole[: len(whole) // 2], f"head of a {format}": whole[:40]}
    after = plain[:33]  # signature and header
    found |= {
        "zTXt bomb": after + chunk(b"zTXt", b"c\0\0" + bomb) + plain[33:],
        "iTXt bomb": after + chunk(b"iTXt", b"c\0\1\0\0\0" + bomb) + plain[33:],
        "many iTXt": after + chunk(b"iTXt", b"c\0\1\0\0\0" + zlib.compress(b"A" * 900_000)) * 90 + plain[33:],
        "ICC bomb": after + chunk(b"iCCP", b"c\0\0" + bomb) + plain[33:],
        "no ICC": after + chunk(b"iCCP", b"c\0\0nothing") + plain[33:],
        "EXIF of nothing": after + chunk(b"eXIf", b"MM\0*\xff\xff\xff\xff") + plain[33:],
        "many pieces": after + chunk(b"prVt", b"") * 3000 + plain[33:],
        "many pieces behind": plain[:-12] + chunk(b"prVt", b"") * 3000 + plain[-12:],
        "damaged checksum": plain.replace(b"IDAT", b"IDAX"),
        "pixels too many": png(60_000, 60_000, 8, 2, b""),
        "pixels one too many": png(6325, 6325, 8, 0, b""),
        "pixels of a WebP": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f\xff\xff\xff\x0f" + b"\0" * 9,
        "pixels none": png(0, 5, 8, 2, b""),
        "a hair": saved(Image.new("L", (1, 300)), "PNG"),
        "two headers": two_headers(),
        "many scans": many_scans((50, 40), 200),
        "scans without an end": saved(photo(), "JPEG", progressive=True)[:-30],
        "a tail": plain + b"PK\x03\x04" * 50,
        "pieces too long": after + b"\xff\xff\xff\xffIDAT" + plain[41:],
        "rows too many": png(10, 10, 8, 2, b"\0" * 100_000),
        "rows too few": png(10, 10, 8, 2, b"\0" * 100),
        "a page": SIGNATURE + b"<script>alert(1)</script>",
        "nothing": b"",
        "JPEG of nothing": b"\xff\xd8\xff\xe0",
        "BMP of nothing": b"BM" + b"\0" * 60,
        "BMP upside down": _bmp_from_the_top(),
        "BMP in run lengths": _bmp_run_lengths(),
    }
    return found


def _bmp_from_the_top() -> bytes:
    data = bytearray(saved(photo(), "BMP"))
    data[22:26] = struct.pack("<i", -43)
    return bytes(data)


def _bmp_run_lengths() -> bytes:
    rows = b"".join(bytes([20, y, 12, 255 - y, 0, 0]) for y in range(30)) + b"\0\1"
    palette = b"".join(bytes([i, 255 - i, i // 2, 0]) for i in range(256))
    start = 14 + 40 + len(palette)
    head = struct.pack("<2sIHHI", b"BM", start + len(rows), 0, 0, start)
    return head + struct.pack("<IiiHHIIiiII", 40, 32, 30, 1, 8, 1, len(rows), 0, 0, 256, 0) + palette + rows


def _exif_bombs() -> dict[str, bytes]:
    """EXIF data whose every entry points at nearly all of them."""

    def entries(count: int, size: int) -> bytes:
        each = b"".join(struct.pack(">HHII", 1000 + i, 1, size, 0) for i in range(count))
        return b"MM\0*" + struct.pack(">IH", 8, count) + each + b"\0\0\0\0"

    plain, jpeg = saved(photo(), "PNG"), saved(photo(), "JPEG")

    def segment(marker: bytes, data: bytes) -> bytes:
        return jpeg[:2] + marker + struct.pack(">H", len(data) + 2) + data + jpeg[2:]

    return {
        "PNG": plain[:33] + chunk(b"eXIf", entries(16_000, 180_000)) + plain[33:],
        "JPEG": segment(b"\xff\xe1", b"Exif\0\0" + entries(5_000, 60_000)),
        "MPO": segment(b"\xff\xe2", b"MPF\0" + entries(5_000, 60_000)),
    }


EXIF_BOMBS = _exif_bombs()
FILES: dict[str, bytes] = {**_modes(), **_turned(), **_hostile()}
