"""x"""


def symptoms():
    pass
