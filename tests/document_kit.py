"""PDF and Office files by hand, for tests."""

from __future__ import annotations

import io
import random
import re
import zipfile
import zlib


def pdf(pages: list[str], packed: bool = True) -> bytes:
    """A PDF of these pages, each line of a text on a line of its own."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    kids = []
    for text in pages:
        shown = "".join(
            f"({line}) Tj T*\n" for line in text.replace("(", "\\(").replace(")", "\\)").split("\n")
        )
        stream = f"BT /F1 11 Tf 40 800 Td 14 TL\n{shown}ET".encode("latin-1")
        filter = b""
        if packed:
            stream, filter = zlib.compress(stream), b"/Filter/FlateDecode"
        objects.append(b"<</Length %d%s>>stream\n%s\nendstream" % (len(stream), filter, stream))
        kids.append(b"%d 0 R" % (len(objects) + 1))
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>"
            % len(objects)
        )
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(kids), b" ".join(kids))
    out, places = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(out + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start))


def zipped(**files: str | bytes) -> bytes:
    """A ZIP; ``__`` in a name is a slash, ``_`` a full stop."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return out.getvalue()


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" ContentType='
    '"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="a" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)


def docx(paragraphs: list[str]) -> bytes:
    """A document of Word; a paragraph that begins with ``# `` is a heading."""
    body = ""
    for text in paragraphs:
        style = '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>' if text.startswith("# ") else ""
        body += f"<w:p>{style}<w:r><w:t>{text.removeprefix('# ')}</w:t></w:r></w:p>"
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    files = {"[Content_Types].xml": TYPES, "_rels/.rels": RELATIONS, "word/document.xml": document}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def ods(rows: list[list[str]]) -> bytes:
    """A spreadsheet of OpenDocument with one sheet."""
    name = "urn:oasis:names:tc:opendocument:xmlns:"
    cells = "".join(
        f"<table:table-row>{''.join(f'<table:table-cell><text:p>{cell}</text:p></table:table-cell>' for cell in row)}"
        "</table:table-row>"
        for row in rows
    )
    content = (
        f'<office:document-content xmlns:office="{name}office:1.0" xmlns:table="{name}table:1.0" '
        f'xmlns:text="{name}text:1.0"><office:body><office:spreadsheet><table:table table:name="A">{cells}'
        "</table:table></office:spreadsheet></office:body></office:document-content>"
    )
    manifest = f'<manifest:manifest xmlns:manifest="{name}manifest:1.0"/>'
    return zipped(
        mimetype="application/vnd.oasis.opendocument.spreadsheet",
        content_xml=content,
        **{"META-INF__manifest_xml": manifest},
    )


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A damaged document: as a whole, or within a member of its ZIP or a stream of its PDF, packed again as they
    were, so that the parser behind the unpacking meets the damage."""
    kind = chance.random()
    if kind < 0.1:
        return data[: chance.randint(min(5, len(data)), len(data))]
    if kind < 0.4:
        return data[:5] + _flipped(data[5:], chance)
    return _member_damaged(data, chance) if data.startswith(b"PK") else _stream_damaged(data, chance)


def _flipped(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 12)):
        at, kind = chance.randrange(len(found) or 1), chance.random()
        if kind < 0.6:
            found[at : at + 1] = bytes([chance.randrange(256)])
        elif kind < 0.8:
            del found[at : at + chance.randrange(1, 40)]
        else:
            found[at:at] = found[chance.randrange(len(found) or 1) :][: chance.randrange(1, 40)]
    return bytes(found)


BOMB = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi"))
    + "]>"
)


def _xml_damaged(xml: bytes, chance: random.Random) -> bytes:
    """XML of great depth, with entities, with very many attributes or numbers, or with a part of it moved."""
    tags = list(re.finditer(rb"<[\w:]+[^<>]*>", xml))
    if not tags:
        return _flipped(xml, chance)
    tag = chance.choice(tags)
    name = re.match(rb"<([\w:]+)", tag[0])[1]
    kind, before, behind = chance.randrange(6), xml[: tag.end()], xml[tag.end() :]
    if kind == 0:
        deep = 10 ** chance.randint(1, 5)
        return before + b"<%s>" % name * deep + b"</%s>" % name * deep + behind
    if kind == 1:
        head, mark, body = xml.rpartition(b"?>")
        return head + mark + BOMB.encode() + body.replace(b"</", b"&i;</")
    if kind == 2:
        many = b" ".join(b'a%d="%d"' % (i, i) for i in range(10 ** chance.randint(1, 4)))
        return xml[: tag.start()] + b"<%s %s>" % (name, many) + behind
    if kind == 3:
        return re.sub(
            rb'"-?\d+"', lambda found: b'"%d"' % (chance.choice((-1, 0, 1)) << chance.randrange(70)), xml
        )
    if kind == 4:
        return before + tag[0] * 10 ** chance.randint(1, 4) + behind
    other = chance.choice(tags)
    return xml[: tag.start()] + other[0] + behind


def _member_damaged(data: bytes, chance: random.Random) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # it was damaged before, in one way or another
        members = {}
    if not members:
        return _flipped(data, chance)
    name, out, kind = chance.choice(list(members)), io.BytesIO(), chance.randrange(7)
    if kind < 4:
        members[name] = _xml_damaged(members[name], chance)
    elif kind == 4:
        members[name] = _flipped(members[name], chance)
    elif kind == 5:
        members[name] = members[chance.choice(list(members))]
    else:
        members["../" * chance.randrange(3) + name[1:]] = members.pop(name)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for other, content in members.items():
            archive.writestr(other, content)
    packed = out.getvalue()
    if chance.random() < 0.2:  # a size or a place in the directory that is not so
        at = packed.find(b"PK\x01\x02") + chance.choice((20, 24, 42))
        packed = packed[:at] + chance.randbytes(4) + packed[at + 4 :]
    return packed


def _stream_damaged(data: bytes, chance: random.Random) -> bytes:
    """A PDF whose text is damaged behind its filter, whose numbers are others, or whose objects refer in circles."""
    kind = chance.randrange(4)
    if kind == 0:
        other = lambda found: b" %d 0 R" % chance.randrange(1, 8) if chance.random() < 0.3 else found[0]
        return re.sub(rb" \d+ 0 R", other, data)
    if kind == 1:
        other = lambda found: (
            b"%d" % (chance.choice((-1, 1)) << chance.randrange(40)) if chance.random() < 0.05 else found[0]
        )
        return data[:8] + re.sub(rb"\d+", other, data[8:])
    if kind == 2:
        deep = 10 ** chance.randint(1, 5)
        opens, closes = chance.choice([(b"[", b"]"), (b"<</A ", b">>"), (b"(", b")")])
        at = chance.choice([found.end() for found in re.finditer(rb"<<", data)] or [5])
        return data[:at] + b"/B " + opens * deep + closes * deep + data[at:]

    def damaged(found: re.Match[bytes]) -> bytes:
        try:
            text = zlib.decompress(found[1])
        except zlib.error:
            return found[0]
        if chance.random() < 0.3:
            text = b"BT /F1 11 Tf " + text * 10 ** chance.randint(1, 3) + b"q " * 10 ** chance.randint(1, 5)
        return b"stream\n%s\nendstream" % zlib.compress(_flipped(text, chance))

    return re.sub(rb"stream\n(.*?)\nendstream", damaged, data, flags=re.S)
