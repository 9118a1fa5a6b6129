"""placeholder"""


def check(framework, config):
    pass
