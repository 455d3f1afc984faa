"""True captions of scenes, from "circle and square" to a paragraph. All chance comes from the caller's generator.

A phrase is a pure function of (scene, form, wording): under one form and wording the two scenes of a swap get the same
words in another order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp
from statistics import NormalDist

from scene import INVERSE, SHAPES, Relation, Scene, Size, Swap, Thing

SPECIALS = 2  # start and end of text
LIMITS = (5, 77)  # tokens, specials included
LENGTHS = NormalDist(mu=2.76, sigma=0.5)  # of the logarithm of a caption's tokens: median about 15
OPENINGS = ("a picture of", "an image of", "a view of", "this is", "there is", "here is", "here we see", "you can see")
RELATIONS: dict[Relation, tuple[str, ...]] = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
SYNONYMS: dict[Size, tuple[str, ...]] = {"small": ("small", "little"), "large": ("large", "big")}
FRAMES = {
    "wide": "the picture is wider than it is tall",
    "tall": "the picture is taller than it is wide",
    "square": "the picture is as wide as it is tall",
}


@dataclass(frozen=True)
class Backdrop:
    """What captions may say of a picture beyond its scene: e.g. "grainy", "grey", "wide"."""

    texture: str
    tone: str
    frame: str


@dataclass(frozen=True)
class Form:
    """Which facts a phrase states, and how it opens and ends."""

    colour: bool = False
    size: bool = False
    relation: bool = False
    article: bool = False
    opening: bool = False
    backdrop: bool = False


@dataclass(frozen=True)
class Wording:
    """Which of several equal words a caption uses; `flipped` mentions the second thing first."""

    flipped: bool
    size: dict[Size, str]
    relation: dict[Relation, str]
    link: str
    opening: str
    texture: bool

    @classmethod
    def pick(cls, rng: random.Random) -> Wording:
        """Random choices of one caption."""
        return cls(
            flipped=rng.random() < 0.5,
            size={size: rng.choice(words) for size, words in SYNONYMS.items()},
            relation={relation: rng.choice(words) for relation, words in RELATIONS.items()},
            link=rng.choice(("and", "and", "with")),
            opening=rng.choice(OPENINGS),
            texture=rng.random() < 0.5,
        )


def num_tokens(text: str) -> int:
    """Words, punctuation marks and specials: what a tokenizer trained on these captions makes of a text."""
    return text.count(" ") + 1 + text.count(".") + text.count(",") + SPECIALS


def captions(rng: random.Random, scene: Scene, backdrop: Backdrop) -> list[str]:
    """3 to 5 different true captions, of lengths spread over `LENGTHS`, in random order."""
    count = rng.randint(3, 5)
    found: list[str] = []
    for i in range(count):
        # One length from each of `count` equal shares of the distribution: short and long captions in every scene.
        quantile = (i + max(rng.random(), 1e-9)) / count
        target = min(LIMITS[1], max(LIMITS[0], round(exp(LENGTHS.inv_cdf(quantile)))))
        while (text := _caption(rng, scene, backdrop, target)) in found:
            target += 1
        found.append(text)
    rng.shuffle(found)
    return found


def full_caption(scene: Scene, *, flipped: bool) -> str:
    """Colour, size and shape of both things and their relation, in the plainest words.

    Example:
        "a small red ring left of a large blue cross", flipped "a large blue cross right of a small red ring"
    """
    form = Form(colour=True, size=True, relation=True, article=True)
    sizes: tuple[Size, ...] = (scene.first.size, scene.second.size)
    wording = Wording(
        flipped=flipped,
        size={size: size for size in sizes},
        relation={relation: relation for relation in RELATIONS},
        link="",
        opening="",
        texture=False,
    )
    return phrase(scene, form, wording, Backdrop("", "", ""))


def pair_captions(rng: random.Random, swap: Swap, scenes: tuple[Scene, Scene], backdrop: Backdrop) -> tuple[str, str]:
    """One phrase for each scene of a swap, the same words in another order; each false of the other scene."""
    form = Form(
        colour=True,
        size=swap == "size" or rng.random() < 0.5,
        relation=swap == "relation" or rng.random() < 0.5,
        article=rng.random() < 0.8,
        backdrop=rng.random() < 0.3,
    )
    form = replace(form, opening=form.article and rng.random() < 0.3)
    wording = Wording.pick(rng)
    return phrase(scenes[0], form, wording, backdrop), phrase(scenes[1], form, wording, backdrop)


def phrase(scene: Scene, form: Form, wording: Wording, backdrop: Backdrop) -> str:
    """A caption without a verb, such as "a small red ring left of a large blue cross on a grey background"."""
    a, b, relation = scene.first, scene.second, scene.relation
    if wording.flipped:
        a, b, relation = b, a, INVERSE[relation]
    nouns = [_noun(thing, form, wording) for thing in (a, b)]
    link = wording.relation[relation] if form.relation else wording.link
    if nouns[0] == nouns[1] and not form.relation:
        text = f"a pair of {_plural(nouns[0])}"
    elif form.article:
        text = f"{_article(nouns[0])} {link} {_article(nouns[1])}"
    else:
        text = f"{nouns[0]} {link} {nouns[1]}"
    if form.opening:
        text = f"{wording.opening} {text}"
    if form.backdrop:
        surface = f"{backdrop.texture} {backdrop.tone}" if wording.texture else backdrop.tone
        text = f"{text} on {_article(surface)} background"
    return text


def class_names() -> list[str]:
    """What zero-shot prompts are made of: the two shapes of a picture, in no order; `scene.label` numbers them."""
    return [
        f"a pair of {_plural(a)}" if a == b else f"a {a} and a {b}" for i, a in enumerate(SHAPES) for b in SHAPES[i:]
    ]


def _caption(rng: random.Random, scene: Scene, backdrop: Backdrop, target: int) -> str:
    """A caption of at most `target` tokens (or the shortest phrase there is), and not many fewer."""
    wording = Wording.pick(rng)
    form = Form()
    for fact in _facts(rng):
        richer = replace(form, **{fact: True})
        if num_tokens(phrase(scene, richer, wording, backdrop)) <= target:
            form = richer
    text = phrase(scene, form, wording, backdrop)
    room = target - num_tokens(text) - 1  # for the full stop that closes the phrase once a sentence follows
    sentences: list[str] = []
    for sentence in _sentences(rng, scene, wording, backdrop):
        cost = num_tokens(sentence) - SPECIALS + 1
        if cost <= room:
            sentences.append(sentence)
            room -= cost
        if room < 5:
            break
    if not sentences:
        return text
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in (text, *sentences))


def _facts(rng: random.Random) -> list[str]:
    """Fields of `Form` in the order in which a caption takes them up: colour soon, the backdrop late or never."""
    order = {"colour": 0.2, "relation": 0.7, "size": 0.8, "article": 0.8, "opening": 1.6, "backdrop": 1.6}
    haste = {fact: rng.random() * late for fact, late in order.items()}
    facts = sorted((fact for fact in haste if haste[fact] < 1.2), key=haste.__getitem__)
    if "opening" in facts:  # "this is red circle …" is no English
        facts.remove("article")
        facts.insert(facts.index("opening"), "article")
    return facts


def _sentences(rng: random.Random, scene: Scene, wording: Wording, backdrop: Backdrop) -> Iterator[str]:
    """True sentences in random order, none twice."""
    a, b, relation = scene.first, scene.second, scene.relation
    if wording.flipped:
        a, b, relation = b, a, INVERSE[relation]
    inverse = wording.relation[INVERSE[relation]]
    ends = {"left of": ("on the left", "on the right"), "above": ("at the top", "at the bottom")}[scene.relation]
    look_first, look_second = _references(rng, scene.first, scene.second, wording)
    ref_a, ref_b = _references(rng, a, b, wording)
    back_a, back_b = _references(rng, a, b, wording)
    sentences = [
        _description(a, b, wording),
        _description(b, a, wording),
        f"{ref_a} is {wording.relation[relation]} {ref_b}",
        f"{rng.choice(('in other words', 'put differently'))}, {back_b} is {inverse} {back_a}",
        _sizes(rng, a, b, wording),
        f"one of the two is {a.colour} and the other is {b.colour}"
        if a.colour != b.colour
        else f"both of them are {a.colour}",
        f"the background is {backdrop.texture} and {backdrop.tone}",
        f"{look_first} can be found {ends[0]} and {look_second} {ends[1]}",
        rng.choice(("there is nothing else in the picture", "nothing else is to be seen")),
        rng.choice(("the two do not touch each other", "a gap is left between the two")),
        FRAMES[backdrop.frame],
    ]
    rng.shuffle(sentences)
    yield from sentences


def _references(rng: random.Random, a: Thing, b: Thing, wording: Wording) -> tuple[str, str]:
    """Two definite noun phrases, each of which fits one of the two things only."""
    choices: list[tuple[str, str]] = []
    if a.shape != b.shape:
        choices.append((f"the {a.shape}", f"the {b.shape}"))
    if a.colour != b.colour:
        choices.append((f"the {a.colour} one", f"the {b.colour} one"))
    if a.size != b.size:
        choices.append((f"the {wording.size[a.size]} one", f"the {wording.size[b.size]} one"))
    full = Form(colour=True, size=(a.colour, a.shape) == (b.colour, b.shape))
    choices.append((f"the {_noun(a, full, wording)}", f"the {_noun(b, full, wording)}"))
    return rng.choice(choices)


def _description(thing: Thing, other: Thing, wording: Wording) -> str:
    size = wording.size[thing.size]
    if thing.shape != other.shape:
        return f"the {thing.shape} is {thing.colour} and {size}"
    if thing.colour != other.colour:
        return f"the {thing.colour} one is {_article(f'{size} {thing.shape}')}"
    return f"the {size} one is {_article(f'{thing.colour} {thing.shape}')}"


def _sizes(rng: random.Random, a: Thing, b: Thing, wording: Wording) -> str:
    if a.size == b.size:
        return f"both of them are {wording.size[a.size]}"
    if (a.colour, a.shape) == (b.colour, b.shape):
        return f"one of the two is {wording.size['small']} and the other is {wording.size['large']}"
    # Told apart by colour or shape: "the small one is smaller" says nothing.
    ref_a, ref_b = _references(rng, a, replace(b, size=a.size), wording)
    return f"{ref_a} is {'smaller' if a.size == 'small' else 'larger'} than {ref_b}"


def _noun(thing: Thing, form: Form, wording: Wording) -> str:
    size = f"{wording.size[thing.size]} " if form.size else ""
    colour = f"{thing.colour} " if form.colour else ""
    return f"{size}{colour}{thing.shape}"


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
