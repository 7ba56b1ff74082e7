// The targets of a platform, and how a Python module hands them to JAX.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace kvcanary {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

// By name a capsule with the handler, as jax.ffi.register_ffi_target takes it.
template <size_t kCount>
nanobind::dict registrations(const Target (&targets)[kCount]) {
  nanobind::dict capsules;
  for (const Target& target : targets) capsules[target.name] = nanobind::capsule(reinterpret_cast<void*>(target.handler));
  return capsules;
}

}  // namespace kvcanary
