"""A text of several kinds, to see what keys and values a model makes: prose, speech, lists, numbers, code."""

CALIBRATION_TEXT = """\
The harbour lay quiet in the early light, and the first of the fishing boats had already gone out \
past the stone wall. Anna counted the nets twice, wrote the number down in her small green book, and looked up. "You \
are late again," she said, but she was smiling. Her brother shrugged. "The bus broke down near the old mill. We had to \
walk the last three miles, and nobody had thought of bringing water."

Photosynthesis turns light into chemical energy. In the first stage, chlorophyll absorbs photons and splits water into \
oxygen, protons and electrons; in the second, carbon dioxide is fixed into sugars. The overall rate depends on \
temperature, on the supply of water and on the concentration of carbon dioxide, which has risen from about 280 to more \
than 420 parts per million since 1800.

How to make a simple bread:
1. Mix 500 g of flour, 10 g of salt and 7 g of dry yeast.
2. Add 330 ml of warm water and knead for ten minutes.
3. Let the dough rest until it has doubled, then bake it at 220 degrees for 35 minutes.

User: What is the difference between a list and a tuple in Python?
Assistant: A list can be changed after it has been made, a tuple can't. For example:

def add_all(numbers: list[float]) -> float:
    total = 0.0
    for index, number in enumerate(numbers):
        if number != number:  # skip what isn't a number
            continue
        total += number * (index + 1)
    return total

{"name": "report", "items": [{"id": 17, "price": 4.99}, {"id": 23, "price": 12.5}], "paid": true}

The committee will meet on Tuesday, 14 March, at half past nine. Members who cannot attend should let the secretary \
know by Friday; the minutes of the last meeting, together with the accounts for the third quarter, are attached.

Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung. La bibliothèque est fermée le lundi. El perro duerme \
debajo de la mesa. If x + 2y = 10 and x - y = 1, then 3y = 9, so y = 3 and x = 4.
"""
