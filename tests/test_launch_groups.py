"""A job of one rank: it shares with itself and hears itself."""

from __future__ import annotations

import pytest

from launch.env import RankEnv
from launch.groups import Job, open_job
from moeserve.errors import ConfigError


def test_a_job_of_one_shares_with_itself():
    job = open_job(RankEnv.alone())
    assert isinstance(job, Job) and job.group.size == 1
    assert job.share("address", "tcp://x") == "tcp://x"
    assert not job.said("ready")
    assert job.say("ready")
    assert job.said("ready")
    assert job.meeting.report["launcher"] == "nobody"


def test_problems_of_a_job_of_one_are_told_at_once():
    with pytest.raises(ConfigError, match="odd"):
        open_job(RankEnv.alone(), None, ["odd"])
