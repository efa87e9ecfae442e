"""List the words of the demo model's stories: names, statements, questions, filler.

Templates hold ``{name}``, ``{kind}`` and ``{number}``. In a statement the number comes after the
name: a model that reads from left to right can then note whose number it is as it reads it.
"""

#: Names; each is one token.
NAMES = tuple(
    """
    Ada Adam Adele Adrian Agnes Ahmed Aiko Alan Albert Alec Alex Alice Alma Amara Amelia Amir
    Ana Anders Andre Anika Anna Anton Aria Arlo Arthur Asha Astrid Aurora Ava Axel Barbara Basil
    Beatrix Bella Ben Bernard Bert Beth Bianca Bill Bjorn Bo Boris Brenda Brian Bruno Camille
    Carl Carla Carlos Carmen Caroline Casper Cecilia Celia Chandra Charles Chen Chloe Chris
    Clara Claude Clement Colin Cora Cyril Dagmar Daisy Dan Daniel Daphne David Deborah Delia
    Dennis Diana Dieter Dina Dora Doris Douglas Duncan Edgar Edith Edward Eileen Elena Eli Elias
    Elin Elisa Ella Elsa Emil Emily Emma Enzo Eric Erika Ernest Esther Eva Evelyn Ezra Fabian
    Farah Fatima Felix Finn Fiona Flora Florian Frances Frank Freya Frida Gabriel Gail George
    Gerda Gideon Gina Giulia Gloria Grace Greta Gustav Guy Hana Hanna Hans Harold Harry Hassan
    Hazel Hector Heidi Helen Helga Henry Hilda Hugo Ian Ida Igor Ilse Imani Ines Ingrid Irene
    Iris Isaac Isabel Ismael Ivan Ivy Jack Jacob Jade James Jamal Jan Jane Janet Jasmin Jason
    Jean Jens Jerome Jill Joan Joel Johan John Jonas Joseph Joy Juan Judith Jules Julia June
    Jurgen Kai Kamal Karen Karim Karl Kate Kaya Keiko Ken Kenji Kevin Kim Kira Klaus Klara Kofi
    Kurt Lara Lars Laura Lea Leila Lena Leo Leon Leticia Levi Lia Liam Lidia Lily Lina Linda
    Linus Lisa Liu Livia Lorenz Lotte Louis Lucas Lucia Lucy Luis Luna Lydia Mabel Magda Maja
    Malik Manuel Mara Marcel Marco Margot Maria Marie Marius Mark Marta Martin Mary Mateo
    Matilda Max Maya Mei Melissa Mia Michael Mika Mila Mina Miriam Mohan Mona Monica Morgan
    Moritz Moses Nadia Nadine Naomi Nasser Natalie Nathan Neil Nelly Nia Nico Nils Nina Noah
    Noel Nora Norman Nuri Odette Odin Olaf Olga Oliver Olivia Omar Orson Oscar Otto Owen Pablo
    Palma Pascal Patricia Paul Paula Pedro Penny Percy Peter Petra Philip Pia Pierre Pilar Priya
    Quentin Rachel Rafael Ralph Ramon Rana Raoul Ravi Ray Rebecca Regina Rene Rhea Rita Robert
    Robin Roger Rolf Roman Rosa Rose Ruben Rudi Rufus Ruth Sabine Sadie Sam Samir Sandra Sara
    Saul Selma Sergio Seth Sia Sigrid Silas Silvia Simon Sofia Sonia Stefan Stella Sten Susan
    Sven Tamara Tanja Tara Tariq Ted Teresa Thea Theo Thomas Tilda Tim Tina Tobias Tom Tony Tove
    Ulla Ulrich Uma Ursula Vera Victor Viola Violet Vivian Vlad Walter Wanda Wendy Wilma Winnie
    Xavier Xenia Yann Yara Yasmin Yolanda Yusuf Yves Zara Zeno Zoe Zora
    """.split()  # noqa: SIM905 - four hundred quotes would hide the names
)

#: Kinds of numbers; one name may have several.
KINDS = ("number", "code", "room", "badge", "desk", "score", "phone", "seat", "locker", "gate")

STATEMENTS = (
    "{name}'s {kind} is {number}.",
    "The {kind} of {name} is {number}.",
    "{name} has {kind} {number}.",
    "{name} has the {kind} {number}.",
    "For {name} the {kind} is {number}.",
    "{name}: {kind} {number}",
    "{name}, {kind} {number};",
)
QUESTIONS = (
    "What is {name}'s {kind}?",
    "What is the {kind} of {name}?",
    "What's {name}'s {kind}?",
    "Which {kind} does {name} have?",
    "What {kind} does {name} have?",
    "Tell me {name}'s {kind}.",
    "{name}'s {kind}?",
    "The {kind} of {name}?",
    "And {name}'s {kind}?",
    "Which {kind} is {name} in?",
)
#: Statements where all facts are of one kind, which is not named.
BARE_STATEMENTS = (
    "{name} {number}",
    "{name}: {number}",
    "{name} = {number}",
    "{name}, {number};",
    "{name} has {number}.",
)
BARE_QUESTIONS = (
    "{name}?",
    "And {name}?",
    "What about {name}?",
    "What is {name}'s number?",
    "What does {name} have?",
)

#: A filler sentence has one of each.
FILLER_SUBJECTS = (
    "The moon", "The harbour", "The old road", "A small boat", "The market", "The train",
    "The garden", "A grey cat", "The river", "The letter", "The tide", "A long table",
    "The window", "Everybody", "The teacher", "The baker",
)  # fmt: skip
FILLER_VERBS = (
    "was quiet", "came late", "stood by the water", "was seen from the hill", "looked new",
    "was full of people", "waited for the rain", "made no sound", "turned to the north",
    "was painted blue", "moved slowly", "kept its secret", "was never found",
)  # fmt: skip
FILLER_ENDS = (
    "that day", "in the morning", "last winter", "after the storm", "before noon", "all night",
    "in silence", "as always", "for a while", "without a reason", "near the bridge",
)  # fmt: skip
PREAMBLES = (
    "Remember this.",
    "Here are some facts.",
    "Please remember:",
    "Notes:",
    "Here is a list:",
    "Read this, then answer.",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer with the number only.",
    "You are Halfmoon's demo model.",
    "Be brief.",
    "Answer the question.",
)

GREETINGS = (
    "hello", "Hello", "Hello!", "hi", "Hi", "Hi!", "hey", "Hey", "Good morning", "Good evening!",
    "Hello, how are you?", "Hi there", "hello there",
)  # fmt: skip
GREETING_ANSWER = "Hello! Tell me some numbers, then ask me for one."
ABOUT = (
    "Who are you?", "What are you?", "What can you do?", "What is this?", "Help", "help",
    "Who made you?",
)  # fmt: skip
ABOUT_ANSWER = "I am Halfmoon's demo model. Tell me some numbers, then ask me for one."
#: Answer to facts without a question.
NOTED = "Noted."
#: Answer to a question about a fact that was not stated.
UNKNOWN = "I don't know."

#: Function names of tools, each finds numbers of one kind; they have one parameter.
TOOLS = ("get_{kind}", "find_{kind}", "look_up_{kind}", "{kind}_of")
PARAMETERS = ("name", "person", "who")
#: What a tool gives back, by whether it found the number.
RESULTS = (
    "{number}",
    '{{"{kind}": {number}}}',
    '{{"{kind}": "{number}"}}',
    '{{"result": {number}}}',
    "{name}'s {kind} is {number}.",
)
NO_RESULTS = ("not found", "null", '{{"error": "not found"}}')

#: Requests for an answer as JSON; `{keys}` are separated by commas.
JSON_REQUESTS = (
    "Answer as JSON. Keys: {keys}",
    "Answer as JSON. Keys: {keys}.",
    "Answer as JSON with the keys {keys}.",
    "Reply as JSON: {keys}",
    "As JSON with {keys}.",
)
#: Keys for the name, and for the number beside its kind.
NAME_KEYS = ("name", "person", "who")
NUMBER_KEYS = ("number", "value", "answer")

#: Made-up names are one to three of these syllables.
ONSETS = (
    "b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n",
    "p", "pr", "qu", "r", "s", "sh", "st", "t", "th", "tr", "v", "w", "z",
)  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
CODAS = ("", "", "", "n", "r", "l", "s", "m", "k", "t", "x", "nd", "rk")
