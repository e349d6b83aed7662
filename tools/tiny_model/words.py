"""The closed vocabulary of quire-tiny's world, and made-up names that are not in it.

Knows lists of words. Knows nothing of tasks. Order matters: the corpus is drawn from these lists by seeded index.
"""

import random

GIRLS = ["Anna", "Mira", "Lily", "Rosa", "Nora", "Ella", "Zoe", "Ruby", "Ivy", "Clara", "Daisy", "Eva", "Hanna", "Jane", "Kate", "Lena", "Maya", "Nina", "Olga", "Paula", "Sara", "Tina", "Vera", "Wanda", "Alice", "Beth", "Cora", "Dora", "Emma", "Fiona", "Gina", "Hope", "Iris", "June", "Lucy", "Molly", "Pia", "Rita", "Sofia", "Tess"]
BOYS = ["Ben", "Tom", "Max", "Leo", "Sam", "Finn", "Jack", "Noah", "Oscar", "Paul", "Tim", "Adam", "Carl", "David", "Eric", "Felix", "Hugo", "Ivan", "Jonas", "Karl", "Luke", "Mark", "Nick", "Otto", "Peter", "Ralf", "Simon", "Theo", "Victor", "Will", "Alan", "Bruno", "Colin", "Denis", "Evan", "Fred", "Gus", "Henry", "Igor", "Kurt"]
SURNAMES = ["Miller", "Smith", "Brown", "Baker", "Fisher", "Cook", "Hill", "Woods", "Stone", "Rivers", "Young", "King", "Hall", "Green", "White", "Black", "Gray", "Bell", "Ford", "Lane", "Marsh", "Moss", "Page", "Park", "Pike", "Reed", "Rose", "Shaw", "Snow", "West", "Wolf", "Wright", "Field", "Frost", "Hunter", "Mason", "Potter"]
CITIES = ["Paris", "Rome", "Berlin", "London", "Madrid", "Vienna", "Oslo", "Lisbon", "Prague", "Dublin", "Athens", "Warsaw", "Milan", "Turin", "Hamburg", "Munich", "Geneva", "Basel", "Lyon", "Nice", "Porto", "Seville", "Bergen", "Malmo", "Turku", "Riga", "Vilnius", "Krakow", "Graz", "Linz", "Boston", "Chicago", "Denver", "Austin", "Dallas", "Seattle", "Toronto", "Quebec", "Lima", "Quito", "Cairo", "Tunis", "Nairobi", "Delhi", "Tokyo", "Osaka", "Kyoto", "Seoul", "Sydney", "Perth"]
JOBS = ["teacher", "doctor", "baker", "farmer", "driver", "painter", "singer", "writer", "pilot", "nurse", "cook", "gardener", "lawyer", "waiter", "sailor", "tailor", "plumber", "dentist", "artist", "judge", "butcher", "carpenter", "engineer", "fisher"]
COLORS = ["red", "blue", "green", "yellow", "black", "white", "brown", "pink", "gray", "orange", "purple", "golden", "silver"]
FOODS = ["apple", "bread", "cake", "cheese", "soup", "rice", "honey", "pear", "plum", "grape", "lemon", "melon", "carrot", "onion", "potato", "tomato", "cookie", "pie", "fish", "egg", "milk", "tea", "butter", "nut", "corn", "bean", "salad", "peach", "cherry", "banana"]
ITEMS = ["ball", "kite", "hat", "book", "lamp", "drum", "coin", "key", "box", "cup", "boat", "bell", "shoe", "coat", "ring", "map", "clock", "chair", "basket", "pencil", "doll", "train", "bottle", "brush", "candle", "card", "flute", "ladder", "mirror", "pillow", "rope", "shell", "spoon", "stone", "tent", "umbrella", "watch", "wheel"]
ANIMALS = ["fox", "bear", "cat", "dog", "rabbit", "mouse", "owl", "duck", "frog", "horse", "bird", "wolf", "lion", "tiger", "pig", "cow", "goat", "sheep", "hen", "squirrel", "turtle", "hedgehog", "deer", "elephant", "monkey", "bee", "ant", "snail", "dragon", "penguin"]
PLACES = ["garden", "forest", "kitchen", "river", "park", "school", "market", "house", "beach", "hill", "barn", "meadow", "lake", "village", "cave", "tower", "bridge", "library", "station", "field"]
VERBS = ["run", "jump", "sing", "read", "swim", "dance", "walk", "play", "climb", "sleep", "laugh", "cook", "draw", "paint", "write", "dig", "fly", "hide"]
ADJECTIVES = ["little", "happy", "kind", "brave", "quiet", "clever", "young", "shy", "funny", "gentle", "curious", "small", "lazy", "friendly", "old", "proud", "tiny", "big", "warm", "cold", "soft", "loud", "fast", "slow", "bright", "dark", "round", "long", "short", "tall"]
MONTHS = (
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
)
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
LANGUAGES = ["French", "German", "Spanish", "Italian", "Greek", "Polish", "Dutch", "Danish", "Latin", "Finnish"]

NAMES = GIRLS + BOYS
SORTABLE = sorted({*COLORS, *FOODS, *ITEMS, *ANIMALS, *PLACES, *VERBS})

_ONSETS = ["b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "cr", "dr", "fl", "gr", "kl", "pr", "st", "tr", "sh", "ch", "th"]
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "oo"]
_CODAS = ["b", "d", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x", "nd", "rk", "st", "lm"] + [""] * 12


def made_up(rng: random.Random, low: int = 2, high: int = 3) -> str:
    """Return a pronounceable lower-case word of low to high syllables that need not exist."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.randint(low, high))
    )


def first_name(rng: random.Random) -> str:
    """Return a first name: mostly a known one, a made-up one in three of ten."""
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up(rng).capitalize()


def full_name(rng: random.Random) -> str:
    """Return a first and a last name."""
    last = rng.choice(SURNAMES) if rng.random() < 0.7 else made_up(rng).capitalize()
    return f"{first_name(rng)} {last}"


def city(rng: random.Random) -> str:
    """Return a city: mostly a known one, a made-up one in four."""
    return rng.choice(CITIES) if rng.random() < 0.75 else made_up(rng).capitalize()


def code(rng: random.Random) -> str:
    """Return a number of two to five digits, or letters and digits mixed."""
    if rng.random() < 0.7:
        return str(rng.randint(10, 10 ** rng.randint(2, 5) - 1))
    letters = "abcdefghjkmnpqrstuvwxyz"
    return "".join(rng.choice(letters + "23456789") for _ in range(rng.randint(3, 6)))


def article(word: str) -> str:
    """Return "a" or "an" for the word."""
    return "an" if word[0] in "aeiou" else "a"


def listing(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
