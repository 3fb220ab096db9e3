"""What an emoji is the same thing as: labels from `emoji.json`, concepts, and the split that goes by them.

A *concept* holds the pictures that differ only in skin tone, gender, age, direction, colour, or in a sign on the same
object (`SERIES`), and those that come out alike in at least one style. In each category the tenth of the concepts with
the smallest hashes is held out; those of more than `HELD_OUT_CODES` codes (`person`, `couple`) are not, since one of
them would outweigh all the others. Concepts are those of all labels, drawn in a style or not, so every set has the same
split; what Fluent's publisher withholds (`WITHHELD`) is a stratum of its own, so that the open part has its tenth too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from visgen.config import UserError

CATEGORIES = (
    "Smileys & Emotion",
    "People & Body",
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
    "Symbols",
    "Flags",
)  # of Unicode; the tenth, Component, holds skin-tone swatches and is left out
TONES = {"1f3fb": "light", "1f3fc": "medium-light", "1f3fd": "medium", "1f3fe": "medium-dark", "1f3ff": "dark"}
HELD_OUT = 0.1  # share of the concepts of each category
HELD_OUT_CODES = 40  # the most that a held-out concept may have

# Fluent emoji that the npm package holds but Microsoft's MIT-licensed release does not: flags of countries, couples and
# families are not in github.com/microsoft/fluentui-emoji; the others show trademarks (its issues 25, 28 and 88).
WITHHELD_SUBCATEGORIES = frozenset({"country-flag", "subdivision-flag"})
WITHHELD = frozenset({"couple", "family", "paperclip", "video game", "technologist"})
GENDERED = re.compile(r"\b(MAN|WOMAN|MEN|WOMEN|BOY|GIRL|PRINCE|PRINCESS|FATHER|MOTHER|BRIDE)\b")
FLAG_TWINS = (  # alike in at least one style: equal, or closer than 0.06 (RMS of 0..1 at 32 x 32 pixels)
    ("France", "St. Martin", "Clipperton Island"),
    ("Norway", "Svalbard & Jan Mayen", "Bouvet Island"),
    ("Australia", "Heard & McDonald Islands"),
    ("United States", "U.S. Outlying Islands"),
    ("Spain", "Ceuta & Melilla"),
    ("British Indian Ocean Territory", "Diego Garcia"),
    ("Saudi Arabia", "Sark"),
    ("Romania", "Chad"),
    ("Indonesia", "Monaco"),
    ("Honduras", "Nicaragua", "El Salvador"),
    ("Egypt", "Yemen", "Iraq", "Syria"),
    ("Palestinian Territories", "Western Sahara", "Jordan"),
)
SERIES = [
    (re.compile(pattern), concept)
    for pattern, concept in (
        (r"^FAMILY\b", "family"),
        (r"^KISS(:|$)|^COUPLE WITH HEART|HOLDING HANDS$", "couple"),
        (r"^(OLDER )?(ADULT|MAN|WOMAN|CHILD|BOY|GIRL|PERSON)$|^(PERSON|MAN|WOMAN): ", "person"),
        (r"^BEARDED PERSON$|BLOND HAIR$", "person"),
        (r"^PRINCE(SS)?$|^PERSON WITH CROWN$", "royalty"),
        (r"(FATHER|MOTHER) CHRISTMAS|CLAUS$", "claus"),
        (r"^PREGNANT\b", "pregnant"),
        (r"^BREAST-FEEDING$|FEEDING BABY$", "feeding baby"),
        (r"^DANCER$|^(WO)?MAN DANCING$", "dancer"),
        (r"^RAISED (BACK OF )?HAND\b|^HAND WITH FINGERS SPLAYED$", "raised hand"),
        (r"^EAR( WITH|$)", "ear"),
        (r"^PERSON FROWNING$|^PERSON WITH POUTING FACE$", "frowning person"),
        (r"^BUSTS? IN SILHOUETTE$", "bust"),
        (r"\bCAT FACE\b", "cat face"),
        (r"^IMP$|WITH HORNS$", "imp"),
        (r"(SPEECH|THOUGHT) BALLOON$|(SPEECH|ANGER) BUBBLE$", "speech balloon"),
        (r"^CLOCK FACE\b", "clock face"),
        (r"^KEYCAP\b|^HASH KEY$", "keycap"),
        (r"^INPUT SYMBOL\b", "input symbol"),
        (r"^SQUARED (CL|COOL|FREE|ID|NEW|NG|OK|SOS|UP|VS)\b", "squared word"),
        (r"^((BLACK|WHITE|HEAVY|DOUBLE|EXCLAMATION) )+(QUESTION )?MARK\b|QUESTION MARK", "exclamation mark"),
        (r"^(INCOMING )?ENVELOPE\b|^E-MAIL\b", "envelope"),
        (r"ARROW ABOVE$", "arrow above"),
        (r"OPEN CIRCLE ARROWS", "circle arrows"),
        (r"\bMOON (SYMBOL|WITH FACE)$|^CRESCENT MOON$", "moon"),
        (r"^CLOUD\b|^SUN BEHIND\b", "cloud"),
        (r"^SNOWMAN\b", "snowman"),
        (r"^(CLOSED )?UMBRELLA\b", "umbrella"),
        (r"^(HIGH|LOW) BRIGHTNESS SYMBOL$", "brightness symbol"),
        (r"^EARTH GLOBE\b", "earth globe"),
        (r"POST OFFICE$", "post office"),
        (r"^(RAM|SHEEP)$", "sheep"),
        (r"\bCAMEL$", "camel"),
        (r"^(EVERGREEN|CHRISTMAS) TREE$", "evergreen tree"),
        (r"^BANKNOTE\b", "banknote"),
        (r"\bMAILBOX\b", "mailbox"),
        (r"^(IN|OUT)BOX TRAY$", "tray"),
        (r"CALENDAR$", "calendar"),
        (r"^PAGE\b", "page"),
        (r"^CAMERA\b", "camera"),
        (r"^HOURGLASS\b", "hourglass"),
        (r"\bBATTERY$", "battery"),
        (r"^SPEAKER\b", "speaker"),
        (r"^BELL( WITH|$)", "bell"),
        (r"(PLACE|SPORTS) MEDAL$", "medal"),
        (r"HEART SUIT$", "heart"),
        (r"^(FE)?MALE SIGN$|^TRANSGENDER SYMBOL$", "gender sign"),
        (r"^STAR OF DAVID$|^SIX POINTED STAR", "star of david"),
        (r"^(LATIN|ORTHODOX) CROSS$", "cross"),
    )
]
DROPPED = re.compile(
    r"\b(MAN|WOMAN|MEN|WOMEN|MANS|WOMANS|MENS|WOMENS|PERSON|BOY|GIRL|MALE|FEMALE|LIGHT(?= BLUE)|SIGN|FIRST|SECOND|THIRD"
    r"|LEFT|RIGHT|UP|DOWN|(LEFT|RIGHT|UP|DOWN)WARDS|NORTH|SOUTH|EAST|WEST|CLOCKWISE|ANTICLOCKWISE|POINTING|BACKHAND"
    r"|FACING|FRONT|ONCOMING|OPEN|CLOSED|RED|ORANGE|YELLOW|GREEN|BLUE|PURPLE|BROWN|BLACK|WHITE|PINK|GREY|HEAVY|LARGE"
    r"|SMALL|MEDIUM)\b"
)


def toned(code: str) -> list[str]:
    """A code without skin tone, and the five that have one behind its first point."""
    first, *rest = code.split("-")
    return [code, *("-".join([first, tone, *(p for p in rest if p != "fe0f")]) for tone in TONES)]


def read_labels(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows, and the positions of the held-out concepts.

    A row is an emoji with its skin tones: name, category, subcategory, concept, codes, whether Fluent's is withheld.
    Rows are sorted by concept; the first of a concept is its base, of neutral gender where there is one.
    """
    try:
        entries = [entry for entry in json.loads(file.read_text()) if entry["category"] in CATEGORIES]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); unpack its package again") from None
    names = {normalise(entry["unified"]): entry["name"] for entry in entries}
    rows: list[dict[str, Any]] = []
    for entry in entries:
        code = normalise(entry["unified"])
        row = {key: entry[key] for key in ("category", "subcategory")} | {"name": entry["name"].lower()}
        row["codes"] = [code, *sorted(normalise(v["unified"]) for v in entry.get("skin_variations", {}).values())]
        row["key"] = concept_of(names.get(neutral_code(code), entry["name"]))
        row["withheld"] = row["key"] in WITHHELD or row["subcategory"] in WITHHELD_SUBCATEGORIES
        row["rank"] = (CATEGORIES.index(entry["category"]), entry["sort_order"])
        row["base"] = (code != neutral_code(code), GENDERED.search(entry["name"]) is not None, row["rank"])
        rows.append(row)
    rows.sort(key=lambda row: row["base"])
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["key"], []).append(row)
    concepts = sorted(found, key=lambda key: found[key][0]["rank"])
    for i, key in enumerate(concepts):
        for row in found[key]:
            row["concept"] = i
    strata = [(found[key][0]["category"], found[key][0]["withheld"]) for key in concepts]
    sizes = [sum(len(row["codes"]) for row in found[key]) for key in concepts]
    held_out = held_out_concepts(zip(concepts, strata, sizes, strict=True))
    return [row for key in concepts for row in found[key]], held_out


def normalise(code: str) -> str:
    """`0039-FE0F-20E3`, `39-fe0f-20e3` -> `39-20e3`: no leading zeros, variation selectors or final tags."""
    points = (int(point, 16) for point in code.replace("_", "-").split("-"))
    return "-".join(f"{point:x}" for point in points if point not in (0xFE0F, 0xE007F))


def neutral_code(code: str) -> str:
    """The code without skin tones, gender signs (2640, 2642) and `facing right` (27a1), man and woman as person."""
    parts = [[p for p in part.split("-") if p not in TONES] for part in code.split("-200d-")]
    parts = [part for part in parts if part not in (["2640"], ["2642"], ["27a1"])]
    if len(parts) > 1 and parts[0] in (["1f468"], ["1f469"]):
        parts[0] = ["1f9d1"]
    return "-200d-".join("-".join(part) for part in parts)


def concept_of(name: str) -> str:
    """The concept of an emoji by the Unicode name of its gender-neutral form."""
    if name.endswith(" Flag"):
        country = name.removesuffix(" Flag")
        return next((twins[0] for twins in FLAG_TWINS if country in twins), country).lower() + " flag"
    for pattern, concept in SERIES:
        if pattern.search(name):
            return concept
    words = re.split(r"[\s-]+", DROPPED.sub("", name).strip("- "))
    return " ".join(words).lower() or name.lower()


def held_out_concepts(concepts: Iterable[tuple[str, tuple[str, bool], int]]) -> list[int]:
    """Positions of the held-out ones of (concept, stratum, codes): a tenth of each stratum, at least one of two."""
    strata: dict[tuple[str, bool], list[tuple[bool, bytes, int]]] = {}
    for i, (concept, stratum, codes) in enumerate(concepts):
        digest = hashlib.blake2b(concept.encode(), digest_size=8).digest()
        strata.setdefault(stratum, []).append((codes > HELD_OUT_CODES, digest, i))
    shares = ((sorted(found), max(round(HELD_OUT * len(found)), len(found) > 1)) for found in strata.values())
    return sorted(i for found, n in shares for large, _, i in found[:n] if not large)
