// Python module _cpu: the host's handlers, and what CUDA programs get where the CUDA module was not built.
#include <nanobind/nanobind.h>

#include "bindings/handlers.h"
#include "cpu/launch.h"

namespace nb = nanobind;

namespace kvcanary {
namespace {

constexpr const char* kNoCuda =
    "jax_kvcanary was installed without its CUDA module, so its custom calls cannot run on a GPU; install the CUDA toolkit's nvcc and "
    "reinstall jax_kvcanary with -C cmake.define.KVCANARY_CUDA=ON.";

template <typename Launch, void (*launcher)(const Launch&)>
ffi::Error run(const Launch& launch) {
  launcher(launch);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kVerify, [](auto... operands) { return handle_verify(run<VerifyLaunch, cpu::launch_verify>, operands...); },
                       bind_verify(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER(kWrite, [](auto... operands) { return handle_write(run<WriteLaunch, cpu::launch_write>, operands...); },
                       bind_write(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER(
    kCudaMissing,
    [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { return ffi::Error(ffi::ErrorCode::kUnimplemented, kNoCuda); },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace
}  // namespace kvcanary

NB_MODULE(_cpu, m) {
  using namespace kvcanary;
  m.doc() = "Custom calls of jax_kvcanary on the host.";
  m.def("registrations", [] {
    nb::dict targets;
    targets["kvcanary_verify"] = capsule(kVerify);
    targets["kvcanary_write"] = capsule(kWrite);
    return targets;
  });
  m.def("cuda_missing_registrations", [] {
    nb::dict targets;
    targets["kvcanary_verify"] = capsule(kCudaMissing);
    targets["kvcanary_write"] = capsule(kCudaMissing);
    return targets;
  });
  m.attr("CUDA_MISSING") = kNoCuda;
  m.def("constants", [] {
    nb::dict values;
    values["CANARY_CHAIN_ANCHOR"] = kChainAnchor;
    values["CANARY_SLOT_BYTES"] = sizeof(Record);
    values["VIOLATION_FIELDS"] = kViolationFields;
    values["NUM_LAUNCH_TAGS"] = kNumTags;
    values["FAIL_REASON_COLUMNS"] = kReasonColumns;
    values["MAX_REAL_KV_SOURCES"] = kMaxSources;
    values["MAX_ENDPOINTS"] = kMaxEndpoints;
    return values;
  });
}
