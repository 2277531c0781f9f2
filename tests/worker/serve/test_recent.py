"""The last minutes of a worker, as its heartbeats carry them."""

from sluice.worker.serve.status_reporter import NUM_SAMPLES, SAMPLE_S, Recent


class Clock:
    """A clock that the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TestGivenAWorkerThatBeats:
    """Its clock is the test's."""

    def test_when_a_sample_is_over_then_it_has_the_rates_of_its_time(self) -> None:
        clock = Clock()
        recent = Recent(clock=clock)

        clock.now_s += SAMPLE_S - 1
        recent.sample(running=1, waiting=0, kv_share=0.1, tokens=(50, 5))
        early = str(recent)
        clock.now_s += 1
        recent.sample(running=3, waiting=2, kv_share=0.25, tokens=(1000, 200))
        clock.now_s += 2 * SAMPLE_S
        recent.sample(running=0, waiting=0, kv_share=0.0, tokens=(1000, 400))

        assert early == ""
        assert str(recent) == "3,2,250,100,20;0,0,0,0,10"

    def test_when_it_works_for_long_then_only_the_last_minutes_are_kept(self) -> None:
        clock = Clock()
        recent = Recent(clock=clock)

        for number in range(NUM_SAMPLES + 5):
            clock.now_s += SAMPLE_S
            recent.sample(running=number, waiting=0, kv_share=0.0, tokens=(0, 0))

        kept = str(recent).split(";")
        assert [int(one.split(",")[0]) for one in kept] == list(range(5, NUM_SAMPLES + 5))
