"""stub"""
class LocatedPieces:
    def __init__(self, tp, not_loaded): pass
    def records(self, root, found, audited, reader):
        yield "source", {"root": root, "bytes_expected": 0, "bytes_audited": 0, "missing": []}
