"""Features that not every user needs, each in a folder of its own with one face that the rest of the program may import."""
