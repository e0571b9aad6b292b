"""The vocabulary that the tasks are filled with, and facts about simple things."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor Wendy Adam Bella "
    "Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura Martin Nina Oscar Petra Robert Sara Thomas Alice Boris Cora Dora "
    "Edgar Flora Gina Hugo Ida Jonas Lena Max Nora Otto Rita Simon Tara Vera Walter Zoe Amir Chen Fatima Hana Kofi Lina Mei Omar "
    "Priya Ravi Sofia Yusuf Jana Marco Elena Pablo Ingrid Lars Aisha Diego"
)
SURNAMES = _words(
    "Smith Brown Green Miller Fischer Rossi Novak Garcia Silva Khan Tanaka Weber Martin Larsen Cohen Murphy Clark Lewis Walker "
    "Young King Wright Hill Scott Adams Baker Carter Cooper Ward Bell Ross Reed Wood Price Long Hughes Stone Marsh Field"
)
CITIES = _words(
    "Paris London Berlin Rome Madrid Vienna Oslo Dublin Lisbon Athens Prague Warsaw Helsinki Tokyo Boston Chicago Toronto Sydney "
    "Cairo Lima Delhi Seoul Geneva Munich Milan Porto Bristol Dallas Denver Seattle Kyoto Osaka Nairobi Accra Hamburg Lyon "
    "Turin Bergen Krakow Zurich"
)
ANIMALS = _words(
    "dog cat horse cow sheep goat pig hen duck goose fox wolf bear rabbit mouse lion tiger zebra monkey owl eagle frog turtle "
    "snake spider bee ant whale dolphin penguin camel deer squirrel parrot"
)
FRUITS = _words("apple banana pear orange lemon peach plum cherry grape melon mango fig kiwi lime apricot papaya")
FOODS = _words("bread cheese soup rice pasta salad cake pizza fish beans butter honey milk tea coffee juice")
COLORS = _words("red blue green yellow black white brown orange purple pink gray")
THINGS = _words(
    "book lamp table chair clock pen cup bag key box ball coat hat shoe phone mirror basket bottle spoon knife plate candle "
    "ladder map letter coin ring rope bell drum kite umbrella blanket pillow bucket hammer brush camera guitar wheel"
)
PLACES = _words(
    "garden kitchen park school library market station forest river beach farm hospital museum bakery office square bridge "
    "harbor village tower church hotel theater castle"
)
CLOSABLE_PLACES = _words("library school market museum bakery office hotel theater castle")
OUTDOOR_PLACES = _words("garden park market station forest river beach farm bridge harbor village church castle school")
ON_PLACES = frozenset({"beach", "farm", "bridge"})
BY_PLACES = frozenset({"river"})
AT_PLACES = frozenset({"school", "market", "station", "hotel"})
JOBS = _words(
    "teacher doctor nurse farmer baker pilot driver painter writer singer cook gardener lawyer engineer dentist carpenter "
    "plumber librarian photographer sailor tailor waiter judge reporter"
)
HOBBIES = _words(
    "reading swimming cooking painting dancing singing running hiking fishing gardening chess tennis football music sailing "
    "cycling skiing photography knitting drawing"
)
ADJECTIVES = _words(
    "small big old young happy sad quiet loud quick slow kind brave clever hungry tired friendly warm cold bright dark soft "
    "strong gentle proud shy curious lazy busy lucky lonely"
)
MOODS = _words("happy sad quiet tired friendly hungry lazy busy lonely proud shy curious lucky")
ANIMAL_COLORS = ("black", "white", "brown", "gray")
NOUNS = (*ANIMALS, *FRUITS, *THINGS, *PLACES)
WORDS = (*NOUNS, *FOODS, *COLORS, *JOBS, *ADJECTIVES)
MONTHS = _words("January February March April May June July August September October November December")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna", "Norway": "Oslo",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Greece": "Athens", "Poland": "Warsaw", "Finland": "Helsinki", "Japan": "Tokyo",
    "Egypt": "Cairo", "Peru": "Lima", "India": "New Delhi", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Hungary": "Budapest",
    "Belgium": "Brussels", "Canada": "Ottawa", "Cuba": "Havana", "Kenya": "Nairobi", "Ghana": "Accra", "Chile": "Santiago",
    "China": "Beijing", "Russia": "Moscow", "Turkey": "Ankara", "Iceland": "Reykjavik", "Thailand": "Bangkok",
    "Australia": "Canberra", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb", "Serbia": "Belgrade",
    "Argentina": "Buenos Aires", "Mexico": "Mexico City", "Vietnam": "Hanoi", "Iran": "Tehran", "Iraq": "Baghdad",
    "South Korea": "Seoul", "the United Kingdom": "London", "the United States": "Washington, D.C.",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "tall": "short", "fast": "slow", "old": "young", "happy": "sad", "light": "dark",
    "full": "empty", "open": "closed", "rich": "poor", "hard": "soft", "wet": "dry", "clean": "dirty", "early": "late",
    "strong": "weak", "high": "low", "near": "far", "loud": "quiet", "day": "night", "up": "down", "left": "right",
    "true": "false", "good": "bad", "first": "last", "long": "short", "thick": "thin", "wide": "narrow", "deep": "shallow",
    "easy": "difficult", "cheap": "expensive", "brave": "cowardly", "polite": "rude", "safe": "dangerous", "sweet": "bitter",
    "inside": "outside", "above": "below", "before": "after", "begin": "end", "push": "pull", "buy": "sell", "love": "hate",
    "win": "lose", "laugh": "cry", "give": "take", "remember": "forget", "summer": "winter", "north": "south", "east": "west",
}  # fmt: skip
PLURALS = {
    "mouse": "mice", "child": "children", "man": "men", "woman": "women", "tooth": "teeth", "foot": "feet", "goose": "geese",
    "person": "people", "leaf": "leaves", "knife": "knives", "wolf": "wolves", "city": "cities", "baby": "babies", "box": "boxes",
    "bus": "buses", "sheep": "sheep", "fish": "fish", "potato": "potatoes", "cherry": "cherries", "story": "stories",
    "dog": "dogs", "book": "books", "house": "houses", "tree": "trees", "glass": "glasses", "dish": "dishes", "life": "lives",
}  # fmt: skip
PASTS = {
    "go": "went", "eat": "ate", "see": "saw", "run": "ran", "take": "took", "give": "gave", "come": "came", "make": "made",
    "write": "wrote", "read": "read", "sing": "sang", "swim": "swam", "drink": "drank", "buy": "bought", "think": "thought",
    "teach": "taught", "sleep": "slept", "speak": "spoke", "find": "found", "know": "knew", "fly": "flew", "grow": "grew",
    "begin": "began", "break": "broke", "bring": "brought", "build": "built", "catch": "caught", "fall": "fell", "feel": "felt",
    "walk": "walked", "play": "played", "jump": "jumped", "carry": "carried", "stop": "stopped", "dance": "danced",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "sheep": "bleats", "pig": "grunts", "horse": "neighs", "duck": "quacks",
    "lion": "roars", "wolf": "howls", "bee": "buzzes", "snake": "hisses", "owl": "hoots", "frog": "croaks", "mouse": "squeaks",
}  # fmt: skip
LEGS = {
    "dog": 4, "cat": 4, "horse": 4, "hen": 2, "duck": 2, "spider": 8, "ant": 6, "bee": 6, "snake": 0, "cow": 4, "frog": 4,
    "penguin": 2, "rabbit": 4, "eagle": 2, "fox": 4, "person": 2, "goat": 4, "owl": 2,
}  # fmt: skip
THING_COLORS = {
    "grass": "green", "snow": "white", "the sky on a clear day": "blue", "a ripe banana": "yellow", "blood": "red",
    "coal": "black", "milk": "white", "a ripe tomato": "red", "chocolate": "brown", "a lemon": "yellow", "an elephant": "gray",
    "a carrot": "orange", "a stop sign": "red", "a frog": "green", "a flamingo": "pink",
}  # fmt: skip
SHAPE_SIDES = {"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "heptagon": 7, "octagon": 8}
PLANETS = _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
UNITS = {
    ("seconds", "minute"): 60, ("minutes", "hour"): 60, ("hours", "day"): 24, ("days", "week"): 7, ("months", "year"): 12,
    ("days", "leap year"): 366, ("meters", "kilometer"): 1000, ("grams", "kilogram"): 1000, ("centimeters", "meter"): 100,
    ("years", "century"): 100, ("years", "decade"): 10, ("items", "dozen"): 12, ("millimeters", "centimeter"): 10,
    ("letters", "English alphabet"): 26, ("weeks", "year"): 52, ("cents", "dollar"): 100,
}  # fmt: skip
TRANSLATIONS = {
    "bread": ("pain", "Brot", "pan", "pane"),
    "book": ("livre", "Buch", "libro", "libro"),
    "house": ("maison", "Haus", "casa", "casa"),
    "table": ("table", "Tisch", "mesa", "tavolo"),
    "milk": ("lait", "Milch", "leche", "latte"),
    "dog": ("chien", "Hund", "perro", "cane"),
    "cat": ("chat", "Katze", "gato", "gatto"),
    "water": ("eau", "Wasser", "agua", "acqua"),
    "apple": ("pomme", "Apfel", "manzana", "mela"),
    "rice": ("riz", "Reis", "arroz", "riso"),
    "night": ("nuit", "Nacht", "noche", "notte"),
    "friend": ("ami", "Freund", "amigo", "amico"),
    "moon": ("lune", "Mond", "luna", "luna"),
    "sun": ("soleil", "Sonne", "sol", "sole"),
    "horse": ("cheval", "Pferd", "caballo", "cavallo"),
}
"""Word -> French, German, Spanish and Italian."""
EXPLANATIONS = {
    "Why is the sky blue?": "Air scatters blue light more than red light, so blue light comes from all parts of the sky.",
    "Why do we sleep?": "Sleep gives the body and the brain time to rest, to repair themselves and to store what we learned.",
    "What is rain?": "Rain is water that falls from clouds in drops.",
    "Why does ice float?": "Ice is less dense than liquid water, so it floats.",
    "What do plants need to grow?": "Plants need light, water, air and nutrients from the soil.",
    "What is a computer?": "A computer is a machine that follows instructions to store and process information.",
    "Why do we have seasons?": "The axis of the Earth is tilted, so each half gets more sunlight in a part of the year.",
    "What is the sun?": "The sun is a star. It gives light and heat to the Earth.",
    "What is the moon?": "The moon is a natural satellite that moves around the Earth.",
    "What causes the tides?": "The gravity of the moon and of the sun pulls on the sea and causes the tides.",
    "What is a bridge for?": "A bridge carries a road or a path across a river, a valley or another road.",
    "Why do leaves fall in autumn?": "Trees drop their leaves in autumn to save water and energy during the winter.",
    "What does a doctor do?": "A doctor examines sick people and helps them to get well.",
    "What does a baker do?": "A baker makes bread and cakes.",
    "What does a teacher do?": "A teacher helps students to learn.",
    "What does a farmer do?": "A farmer grows plants and keeps animals for food.",
    "What is a library?": "A library is a place where people can read and borrow books.",
    "What is a dictionary?": "A dictionary is a book that lists words and explains what they mean.",
    "How do birds fly?": "Birds flap their wings, and the shape of the wings makes the air lift them.",
    "Why do cats purr?": "Cats often purr when they are calm and happy, and sometimes to comfort themselves.",
    "What is gravity?": "Gravity is the force that pulls things toward each other. It keeps us on the ground.",
    "What is an island?": "An island is a piece of land with water on all sides.",
    "What is a volcano?": "A volcano is an opening in the ground from which hot rock, ash and gas come out.",
    "What is electricity?": "Electricity is a form of energy that flows through wires and makes lamps and machines work.",
    "Why should I drink water?": "The body needs water to work well. It loses water all day, so you have to drink.",
    "What is a program?": "A program is a list of instructions that a computer follows.",
    "What is a token?": "A token is a small piece of text, such as a word or a part of a word.",
    "What is a language model?": "A language model is a program that predicts which text comes next.",
    "How does a clock work?": "A clock counts equal steps of time and shows them with hands or with numbers.",
    "What is snow?": "Snow is frozen water that falls from clouds as small white crystals.",
    "What is honey?": "Honey is a sweet food that bees make from the nectar of flowers.",
    "What is bread made of?": "Bread is made of flour, water, salt and often yeast.",
    "How is cheese made?": "Cheese is made from milk. The milk gets thick, the water is removed, and the rest ages.",
    "What is a map?": "A map is a drawing that shows where places are.",
    "What is a friend?": "A friend is a person whom you like and trust.",
    "Why do people read books?": "People read books to learn, to relax and to enjoy a good story.",
    "What is music?": "Music is sound that people arrange so that it is pleasant or moving to hear.",
    "What is a desert?": "A desert is a dry region where very little rain falls.",
    "What is an ocean?": "An ocean is a very large area of salt water.",
    "What is fire?": "Fire is the light and heat that appear when something burns.",
}  # fmt: skip
SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hi! What can I do for you?",
    "Hi there!": "Hello! What would you like to talk about?",
    "Good morning.": "Good morning! How can I help you today?",
    "Good evening.": "Good evening! What can I do for you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "How are you today?": "I am well, thank you. What can I do for you?",
    "Who are you?": "I am nano, a small language model. I can do simple tasks with text and numbers.",
    "What are you?": "I am a small language model. My name is nano.",
    "What is your name?": "My name is nano.",
    "What can you do?": "I can copy and sort text, add numbers, fill in JSON, find facts in a text and call tools.",
    "Are you a human?": "No. I am a small language model.",
    "Are you a robot?": "No, I am a small language model, a program that writes text.",
    "Thank you!": "You are welcome!",
    "Thanks a lot.": "You are welcome. I am glad that I could help.",
    "Thanks": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "Bye": "Bye! See you soon.",
    "See you later.": "See you later!",
    "Good night.": "Good night! Sleep well.",
    "Nice to meet you.": "Nice to meet you, too.",
    "Can you help me?": "Yes, of course. What do you need?",
    "I need help.": "I am happy to help. What is the problem?",
    "I am tired.": "I am sorry to hear that. Perhaps a short rest will help.",
    "I am happy today.": "That is good to hear! What made you happy?",
    "I am sad.": "I am sorry that you are sad. Would you like to talk about it?",
    "I am bored.": "Would you like to hear a short story?",
    "I am hungry.": "Then it is time to eat something. Perhaps some bread or some fruit?",
    "Do you like music?": "I cannot hear music, but I can write about it.",
    "Do you sleep?": "No. I am a program, so I do not need to sleep.",
    "How old are you?": "I am a program, so I have no age.",
    "Where do you live?": "I am a program. I run on a computer.",
    "That was great!": "Thank you! I am glad that you liked it.",
    "That is wrong.": "I am sorry. Please tell me what is wrong, and I will try again.",
    "I do not understand.": "I am sorry. Which part is not clear?",
    "Can you learn?": "I learned from text before we met. I do not learn during a conversation.",
    "Do you know everything?": "No. I am a very small model, and I make mistakes.",
}
DEFINITION_QUESTIONS = (
    "What does the word {word} mean?",
    'What does "{word}" mean?',
    "Define {word}.",
    "Define the word {word}.",
    "Give me a definition of {word}.",
    "What is the meaning of {word}?",
    "Explain the word {word}.",
    "Please define {word}.",
    'Can you tell me what "{word}" means?',
    "I do not know the word {word}. What does it mean?",
    "Meaning of {word}?",
    "Look up the word {word}.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are nano, a small language model.",
    "You are a friendly assistant. Give short answers.",
    "Answer as briefly as you can.",
    "You help people with simple tasks.",
    "You are a careful assistant. Do exactly what the user asks.",
    "Be polite and brief.",
    "You answer questions of users on a web page.",
    "Give correct answers only.",
    "You are the assistant of a small company.",
)


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def where(place: str) -> str:
    """The place with its preposition: "in the garden", "on the farm"."""
    preposition = "on" if place in ON_PLACES else "by" if place in BY_PLACES else "at" if place in AT_PLACES else "in"
    return f"{preposition} the {place}"


def listed(words: list[str] | tuple[str, ...], last: str = "and") -> str:
    """The words as an English list: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
