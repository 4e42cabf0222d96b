"""Text that YAML turns into something else when it is not quoted: times, node lists, digests, image names.

Every function returns what is wrong as one sentence, or None.
"""

import re
from typing import Any

TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):([0-5]\d):([0-5]\d)")
NODE_NAME = r"[A-Za-z][\w.-]*(?:\[[\d,-]+\][\w.-]*)*"
NODE_LIST = re.compile(rf"{NODE_NAME}(?:,{NODE_NAME})*")
ADDRESS = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:]+\]):\d{1,5}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|AUTH|CREDENTIAL", re.IGNORECASE)


def seconds(time: str) -> int:
    """`1-02:00:00` -> 93600. Raises ValueError on another form."""
    match = TIME.fullmatch(time)
    if match is None:
        raise ValueError(f"{time!r} is not a time of the form HH:MM:SS or D-HH:MM:SS.")
    days, hours, minutes, secs = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs


def time_problem(key: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and TIME.fullmatch(value)):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        clock = f"{value // 3600:02}:{value // 60 % 60:02}:{value % 60:02}"
        return (
            f'{key} is the number {value}: YAML reads an unquoted time as base-60. Write "{clock}", in quotes, '
            "if that is what you meant."
        )
    return f'{key} is {value!r}, which is not a time: write "HH:MM:SS" or "D-HH:MM:SS", in quotes.'


def node_list_problem(key: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and NODE_LIST.fullmatch(value)):
        return None
    return (
        f"{key} is {value!r}, which is not a Slurm node list: write text in quotes, such as "
        '"gb200-[0-3],gb200-7".'
    )


def ray_address_problem(key: str, value: str) -> str | None:
    if value == "auto" or ADDRESS.fullmatch(value):
        return None
    return (
        f"{key} is {value!r}, which is not an address: write HOST:PORT of the cluster's head, or auto. Ray's client "
        "(ray://) is not used: run this on a node of the cluster."
    )


def image_problem(key: str, value: Any) -> str | None:
    """Enroot 3.5 refuses references by digest, so the digest has a key of its own."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or re.search(r"\s", value):
        return f'{key} is {value!r}, which is not an image name: write "registry#name:tag" or a .sqsh path, in quotes.'
    if "@sha256:" in value:
        name, _, digest = value.partition("@")
        return (
            f"{key} is {value!r}; enroot refuses references by digest. Write {key}={name} and put {digest} into "
            f"{key}_digest."
        )
    return None


def digest_problem(key: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and DIGEST.fullmatch(value)):
        return None
    return f'{key} is {value!r}, which is not a digest: write "sha256:" and 64 hexadecimal digits, in quotes.'


def word_problem(key: str, value: Any) -> str | None:
    """Names that reach a command line: a partition, an account, a commit."""
    if value is None or (isinstance(value, str) and re.fullmatch(r"[^\s'\"\\;&|<>]+", value)):
        return None
    hint = "YAML reads unquoted digits as a number; " if isinstance(value, int | float) else ""
    return f"{key} is {value!r}, which is not a single word of text: {hint}write it in quotes."


def environment_problem(key: str, name: str, value: Any) -> str | None:
    if SECRET_NAME.search(name):
        return (
            f"{key}.{name} looks like a secret, and configs are written to the run store: export {name} in the "
            "environment instead; jobs inherit it."
        )
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return None
    return f"{key}.{name} is {value!r}, which is not text: write it in quotes."


def setup_problem(key: str, line: str) -> str | None:
    """Setup lines end up in the batch script, which is kept."""
    match = re.search(r"\b(\w+)=\S", line)
    if match and SECRET_NAME.search(match[1]):
        return (
            f"{key} sets {match[1]}, which looks like a secret, and batch scripts are kept in the run store: export "
            "it in the environment instead; jobs inherit it."
        )
    return None
