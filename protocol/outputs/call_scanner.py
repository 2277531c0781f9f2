"""Read one call, `{"name": …, "arguments": {…}}`, character by character. No I/O.

Its arguments are an object, the JSON of one as text, or missing. With anything else it is no call.
"""

import json

MAX_WORD_CHARS = 256
"""Of a key, and of a function's name. A longer one is no call's."""

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallScanner:
    """One call so far. Mutable.

    Arguments are passed on as they are written, once the call is known. Of two values of a key the first one counts.
    """

    def __init__(self) -> None:
        self.name = ""
        self.is_over = False
        """Whether its last brace was read."""

        self.is_wrong = False
        """Whether it is not such a call. What follows is not read."""

        self.is_known = False
        """Whether it has a name, and an object as arguments or none."""

        self._arguments: list[str] = []
        """Those that were not passed on yet."""

        self._has_arguments = self._has_object = False
        """Whether their value was begun, and whether it is an object."""

        self._key: str | None = None
        self._word: list[str] = []
        """The characters of the present key, or of a value that is not passed on as it is written."""

        self._take_next = self._begin
        self._depth = 0
        self._is_in_text = self._is_escaped = False

    def take(self, character: str) -> str:
        """Read the next character, and return arguments that can be passed on."""
        self._take_next(character)
        if self.is_over:
            self.is_wrong = self.is_wrong or not self.name
            if not self._has_arguments:
                self._arguments.append("{}")
        if not self.is_known:
            self.is_known = bool(self.name) and (self._has_object or self.is_over) and not self.is_wrong
        if not self._arguments or not self.is_known:
            return ""
        ready = "".join(self._arguments)
        self._arguments.clear()
        return ready

    def _begin(self, character: str) -> None:
        if character == "{":
            self._take_next = self._before_key
        else:
            self.is_wrong = character not in _SPACE

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._word, self._is_in_text, self._take_next = [character], True, self._in_key
        elif character == "}":
            self.is_over = True
        else:
            self.is_wrong = character not in f"{_SPACE},"

    def _in_key(self, character: str) -> None:
        self._word.append(character)
        self._follow(character)
        if not self._is_in_text:
            self._key, self._take_next = self._new_key(), self._before_value
        self.is_wrong = len(self._word) > MAX_WORD_CHARS

    def _before_value(self, character: str) -> None:
        if character in f"{_SPACE}:":
            return
        self._word, self._depth, self._take_next = [], 0, self._in_value
        if self._key in _ARGUMENTS:
            self._has_arguments, self._has_object = True, character == "{"
            if character not in '{"':
                self.is_wrong = True
                return
        self._in_value(character)

    def _new_key(self) -> str | None:
        """Return the key that was read; None if its value does not count."""
        key = self._text()
        is_repeated = (key == "name" and self.name) or (key in _ARGUMENTS and self._has_arguments)
        return None if is_repeated else key

    def _in_value(self, character: str) -> None:
        is_outside = self._depth == 0 and not self._is_in_text
        if is_outside and character in ",}":
            # Only numbers and words have no end of their own.
            self._end_value()
            self._before_key(character)
            return
        self._keep(character)
        self._follow(character)
        if self._depth == 0 and not self._is_in_text and character in '}]"':
            self._end_value()

    def _keep(self, character: str) -> None:
        # Some models write the JSON of arguments as text once more.
        is_text = bool(self._word) or (character == '"' and not self._is_in_text and self._depth == 0)
        if self._key in _ARGUMENTS and not is_text:
            self._arguments.append(character)
        elif self._key == "name" or self._key in _ARGUMENTS:
            self._word.append(character)

    def _end_value(self) -> None:
        self._take_next = self._before_key
        if self._key == "name":
            self.name = self._text() or ""
            self.is_wrong = not 1 <= len(self.name) <= MAX_WORD_CHARS
        elif self._word:
            written = self._text() or ""
            self._arguments.append(written)
            self._has_object = isinstance(_value_of(written), dict)
            self.is_wrong = not self._has_object
        self._word = []

    def _follow(self, character: str) -> None:
        """Follow texts and braces."""
        if self._is_in_text:
            is_escaped, self._is_escaped = self._is_escaped, character == "\\" and not self._is_escaped
            self._is_in_text = character != '"' or is_escaped
        elif character == '"':
            self._is_in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_wrong = self._depth < 0

    def _text(self) -> str | None:
        """Return the JSON text that was kept; None if it is another value."""
        value = _value_of("".join(self._word))
        return value if isinstance(value, str) else None


def _value_of(text: str) -> object:
    """Return a JSON value; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
