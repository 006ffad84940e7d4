"""What an error of the package must say, in Keras's wording."""

from absl.testing import parameterized


class RefusalCase(parameterized.TestCase):
    """A test of what is refused, and in which words."""

    def assert_refused(self, error, function, expected, received, fix=""):
        """Calls `function` and looks at the error that it raises.

        Args:
            error: The type, itself and no subclass of it.
            function: Called without arguments.
            expected: What the message says was expected.
            received: What it says after `Received: `, or a part of it.
            fix: What it says last. Empty where the expectation lists all that can be
                passed, so that it is the fix.
        """
        with self.assertRaises(error) as caught:
            function()
        self.assertIs(type(caught.exception), error)
        message = str(caught.exception)
        self.assertIn(expected, message)
        self.assertIn("Received: ", message)
        before, after = message.split("Received: ", maxsplit=1)
        self.assertIn(expected, before)
        self.assertIn(received, after)
        self.assertIn(fix, after)
