# What nanobind's stub generator cannot see: attributes of the exception, and types of constants.
memd_native._core.StatusError:
    class StatusError(Exception):
        """
        Something outside failed. `code` is a StatusCode of native/base/status.h, `error_number` an errno or 0, `quota_name` that of a quota of `quota_bytes` that the request would exceed, or empty.
        """

        code: int
        error_number: int
        quota_name: str
        quota_bytes: int

memd_native._core.IO_SECONDS_BOUNDS:
    IO_SECONDS_BOUNDS: list[float]

memd_native._core.STEP_SECONDS_BOUNDS:
    STEP_SECONDS_BOUNDS: list[float]

memd_native._core.TURN_SECONDS_BOUNDS:
    TURN_SECONDS_BOUNDS: list[float]

memd_native._core.ClientSession.lease_resident:
    def lease_resident(self, shard_id: int, dtype: int, shape: Sequence[int]) -> Any:
        """
        The same for reading a value, where that takes no request; otherwise None.
        """

memd_native._core.ClientSession.lease$:
    \from typing import Any
    def lease(
        self, shard_id: int, part: int, mode: int, dtype: int, shape: Sequence[int], timeout_s: float
    ) -> Any:
        """
        A torch tensor over the arena's own bytes. The lease lives exactly as long as the tensor's storage.
        """
