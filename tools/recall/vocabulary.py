"""The demo model's words: the lists that documents are drawn from, and the token id of every word.

Documents, tasks and the tokenizer are built from these lists. A token id is a word's place in `VOCABULARY`,
and trained weights depend on it: append words, never insert them.
"""

from __future__ import annotations

from typing import Final

SPECIAL_TOKENS: Final = (
    "<|pad|>",
    "<|unk|>",
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
PAD_ID, UNK_ID, BOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID = range(7)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DIGITS: tuple[str, ...] = tuple("0123456789")
PUNCTUATION: tuple[str, ...] = tuple(".,?!:;='-()")

ADJECTIVES: tuple[str, ...] = _words(
    """
red blue green yellow black white silver golden purple orange crimson amber violet pink grey brown old
young small large tiny huge quiet loud bright dark cold warm hidden lost broken ancient modern gentle
proud happy sad clever lazy brave shy calm wild smooth rough heavy light narrow wide deep shallow sharp
blunt round square empty crowded northern southern eastern western royal humble rusty shiny frozen dusty
sunny foggy stormy misty marble wooden copper iron glass velvet paper stone secret famous distant sleepy
noble curious honest
"""
)

NOUNS: tuple[str, ...] = _words(
    """
lighthouse castle bridge tower garden library museum station harbor market temple school hospital factory
theater palace cottage cabin tunnel mill barn stable church bakery tavern office studio workshop
warehouse laboratory ship boat train wagon bicycle rocket balloon engine tractor submarine canoe ferry
truck plane glider mountain valley river lake forest desert island canyon cave meadow beach glacier
volcano waterfall swamp dragon tiger falcon wolf bear eagle fox rabbit horse camel dolphin whale turtle
raven owl lion panther badger otter lamp clock mirror piano violin drum trumpet guitar table chair desk
chest drawer cabinet door window gate fence robot statue fountain painting crown ring sword shield helmet
cloak lantern compass telescope camera radio kettle basket bottle barrel ladder hammer anchor feather
candle blanket pillow carpet umbrella
"""
)

NAMES: tuple[str, ...] = _words(
    """
alice bob carol david emma frank grace henry irene jack karen leo maria nathan olivia peter quinn rosa
samuel tina victor wendy xavier yvonne zachary anna boris clara dennis elena felix gloria hugo iris jonas
kate lucas mona oscar paula
"""
)

WORD_VALUES: tuple[str, ...] = _words(
    """
apple banana cherry mango lemon peach plum grape melon papaya kiwi apricot fig olive walnut almond ruby
emerald diamond sapphire pearl topaz opal jade onyx quartz garnet coral ivory cobalt nickel zinc thunder
lightning rainbow comet meteor planet galaxy nebula eclipse aurora tornado blizzard breeze tide pebble
pepper ginger garlic vanilla cinnamon saffron basil mint sage clover maple cedar willow bamboo lotus
orchid tulip daisy puzzle riddle whistle marathon orbit pixel vector matrix cipher beacon echo shadow
mirage harvest velocity
"""
)
"""Values of word attributes."""

PERSONS: tuple[str, ...] = _words(
    """
baker farmer teacher sailor doctor painter singer writer soldier merchant gardener hunter dancer pilot
cook tailor miner judge lawyer nurse student king queen prince child stranger traveler shepherd
blacksmith carpenter
"""
)

TRANSITIVE_VERBS: tuple[str, ...] = _words(
    """
watched followed painted repaired cleaned visited admired found carried moved sold bought described
remembered ignored built touched photographed guarded decorated searched studied measured opened closed
"""
)

INTRANSITIVE_VERBS: tuple[str, ...] = _words(
    """
walked slept waited sang danced laughed worked rested smiled cried whispered travelled arrived listened
stumbled hurried wandered paused swam argued
"""
)

ADVERBS: tuple[str, ...] = _words(
    """
slowly quickly quietly happily sadly carefully suddenly often always never again together alone yesterday
today gladly softly eagerly proudly
"""
)

PREPOSITIONS: tuple[str, ...] = _words(
    """
near behind above below beside inside outside under beyond around toward against
"""
)

TIMES: tuple[str, ...] = _words(
    """
morning evening night afternoon day week month winter summer spring autumn year
"""
)

THINGS: tuple[str, ...] = _words(
    """
bread cheese soup tea coffee milk honey rice letters maps stories songs books flowers stones coins tools
shoes hats ropes nails seeds apples clouds stars shadows rumors news music dust rain snow wind
"""
)

VARIABLES: tuple[str, ...] = _words(
    """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau upsilon
phi chi psi omega foo bar baz qux corge grault garply waldo fred plugh thud
"""
)
"""Names of variables in `set x = ...` statements."""

GRAMMAR: tuple[str, ...] = _words(
    """
the a an of is are was were be to in on at and or but while because so then when if it he she they his
her their what which who tell me please give now i do not know need remember note that this there every
one some many had has have with from by for into very also all let set var value equal say answer
question hello hi thanks thank you assistant helpful document read following text find list both first
second third last next after before s can could your my name am was will yes no ok sure here we us our
how where why
"""
)

CONVERSATION: tuple[str, ...] = _words(
    """
two three values most said good fine help welcome bye goodbye nice meet ask any great see later sorry
think weather like made hey doing much talk more only too questions documents job well
"""
)
"""Words of small talk and of questions with a count."""

DIGIT_ATTRIBUTES: tuple[str, ...] = (
    "access code",
    "pin",
    "serial number",
    "locker number",
    "phone extension",
    "magic number",
)
WORD_ATTRIBUTES: tuple[str, ...] = ("password", "secret word", "codename", "favorite word")
NAME_ATTRIBUTES: tuple[str, ...] = ("owner", "keeper", "architect")

HELD_OUT_ADJECTIVES = frozenset(_words("violet ancient gentle narrow rusty marble velvet humble"))
HELD_OUT_NOUNS = frozenset(
    _words("lighthouse bakery canoe glacier raven mirror statue compass kettle anchor volcano ferry")
)
"""Words that name a fact's entity only in held-out evaluation; training sees them only in filler."""


def _number_words() -> tuple[str, ...]:
    attributes = " ".join(DIGIT_ATTRIBUTES + WORD_ATTRIBUTES + NAME_ATTRIBUTES).split()
    lists = (
        SPECIAL_TOKENS,
        DIGITS,
        PUNCTUATION,
        GRAMMAR,
        ADJECTIVES,
        NOUNS,
        NAMES,
        WORD_VALUES,
        PERSONS,
        TRANSITIVE_VERBS,
        INTRANSITIVE_VERBS,
        ADVERBS,
        PREPOSITIONS,
        TIMES,
        THINGS,
        tuple(attributes),
        VARIABLES,
        CONVERSATION,
    )
    return tuple(dict.fromkeys(word for words in lists for word in words))


VOCABULARY: Final = _number_words()
"""All tokens, by id."""

WORD_IDS: Final = {word: i for i, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Encode words that are separated by single spaces as token ids; raises KeyError at an unknown word."""
    return [WORD_IDS[word] for word in text.split()]


def decode(token_ids: list[int]) -> str:
    """Decode token ids to words, joined by spaces."""
    return " ".join(VOCABULARY[i] for i in token_ids)
