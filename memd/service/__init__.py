"""The gRPC services of memd.v1, one file each, and what stands before all of them."""
