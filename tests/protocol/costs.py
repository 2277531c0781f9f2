"""What a call costs the server, in numbers that do not depend on the machine: commands, and values that they pass."""

from typing import Any, NamedTuple

from sluice.protocol.calls import Call
from sluice.protocol.scripts import load
from tests.protocol.driving import Queue

PLAIN = "local call, try = redis.call, redis.pcall\n"
COUNTING = """
local num_commands, num_values = 0, 0
local function size_of(reply)
  if type(reply) ~= 'table' then return 1 end
  local size = 0
  for _, value in pairs(reply) do size = size + size_of(value) end
  return size
end
local function counting(plain)
  return function(...)
    local reply = plain(...)
    num_commands, num_values = num_commands + 1, num_values + select('#', ...) + size_of(reply)
    return reply
  end
end
local call, try = counting(redis.call), counting(redis.pcall)
local reply = (function()
%s
end)()
return { num_commands, num_values, reply }
"""


class Cost(NamedTuple):
    """The work of one script call."""

    commands: int
    values: int
    """Arguments and replies of its commands: what it passes to the server's data, and looks at."""


def cost_of(queue: Queue, call: Call[Any]) -> Cost:  # Any: the reply is not looked at
    """Run a call and count."""
    head, plain, rest = load(call.script).source.partition(PLAIN)
    assert plain, "the scripts begin with the names of their calls"
    source = head + COUNTING.replace("%s", rest)
    commands, values, _ = queue.client.eval(source, len(call.keys), *call.keys, *call.args)
    return Cost(commands, values)
