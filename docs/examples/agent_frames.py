"""An agent that watches a screen: its prompt holds the last frames, and every step adds one and drops the oldest.

    make serve                                             # in another terminal
    .venv/bin/python docs/examples/agent_frames.py --steps 20

Frames go into the messages as data URLs, the same ones again in every step. The server knows a frame by its content, so
that each is compiled once, in the step in which it first appears, and linked at its new place in every later step until
it leaves the window. Nothing is uploaded and nothing has to be deleted: what is no longer linked is evicted.
"""

import argparse
import base64
import io
from collections import deque
from collections.abc import Iterator

import openai
from PIL import Image, ImageDraw

SYSTEM = "You watch a screen."
QUESTION = "Where is the ball now?"


def screen(step: int, size: int = 96) -> bytes:
    """Return a screenshot as a PNG file; here a ball that moves. Your agent takes one of the browser or the desktop."""
    picture = Image.new("RGB", (size, size), "white")
    x, y = (13 * step) % (size - 16), (7 * step) % (size - 16)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((x, y, x + 15, y + 15), fill=("red", "green", "blue")[step % 3])
    draw.text((2, size - 12), str(step), fill="black")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def part(frame: bytes) -> dict:
    url = f"data:image/png;base64,{base64.b64encode(frame).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def watch(client: openai.OpenAI, steps: int, window: int, policy: str | None = None) -> Iterator[tuple]:
    """Ask after every frame; yield the answer and ``usage.mpic`` of each step.

    The instructions and the frames stand in one order, oldest first. The question comes last, so that the answer is
    computed from what is on the screen now.
    """
    model = client.models.list().data[0].id
    frames: deque[tuple[int, bytes]] = deque(maxlen=window)  # the oldest one is dropped by itself
    for step in range(steps):
        frames.append((step, screen(step)))
        content = []
        for number, frame in frames:
            content += [{"type": "text", "text": f"Step {number}:"}, part(frame)]
        content.append({"type": "text", "text": QUESTION})
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}],
            max_tokens=12,
            temperature=0,
            extra_body={"mpic": {"policy": policy}} if policy else None,
        )
        yield answer.choices[0].message.content, answer.usage.model_extra["mpic"]


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent that keeps a sliding window of frames.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--policy", help="such as mpic-16, or prefix to compare with; default: the server's")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key="none")
    print("step  compiled  reused  computed  first token  answer")
    for step, (text, usage) in enumerate(watch(client, given.steps, given.window, given.policy)):
        tokens, first = usage["tokens"], usage["ms"]["ttft"]
        print(
            f"{step:4} {tokens['compiled']:9} {tokens['reused']:7} {tokens['computed']:9} {first:9.0f} ms  {text!r}"
        )


if __name__ == "__main__":
    main()
