// Python module _cuda: the handlers of CUDA devices. They enqueue kernels and nothing else, which is what command
// buffers ask for.
//
// A phase that reports is left out of them by choice. Its report is held by the host while the next step is launched, so that it lies
// elsewhere each time; XLA would then record all of the command buffer that it is in again, most of the model among it, in each step.
#include <nanobind/nanobind.h>

#include "bindings/handlers.h"
#include "cuda/launch.h"

namespace nb = nanobind;

namespace kvcanary {
namespace {

using Stream = ffi::PlatformStream<cudaStream_t>;

ffi::Error status(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(operation) + ": " + cudaGetErrorString(error));
}

XLA_FFI_DEFINE_HANDLER(
    kVerify,
    [](cudaStream_t stream, auto... operands) {
      return handle_verify([stream](const VerifyLaunch& launch) { return status("kvcanary_verify", cuda::launch_verify(stream, launch)); },
                           operands...);
    },
    bind_verify(ffi::Ffi::Bind().Ctx<Stream>()), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kWrite,
    [](cudaStream_t stream, auto... operands) {
      return handle_write([stream](const WriteLaunch& launch) { return status("kvcanary_write", cuda::launch_write(stream, launch)); },
                          operands...);
    },
    bind_write(ffi::Ffi::Bind().Ctx<Stream>()), {ffi::Traits::kCmdBufferCompatible});

constexpr auto phase = [](cudaStream_t stream, auto... operands) {
  return handle_phase(
      [stream](const VerifyLaunch& verify, const WriteLaunch& write, const ReportLaunch& report) {
        return status("kvcanary_phase", cuda::launch_phase(stream, verify, write, report));
      },
      operands...);
};
XLA_FFI_DEFINE_HANDLER(kPhase, phase, bind_phase(ffi::Ffi::Bind().Ctx<Stream>()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReportPhase, phase, bind_phase(ffi::Ffi::Bind().Ctx<Stream>()));

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace
}  // namespace kvcanary

NB_MODULE(_cuda, m) {
  using namespace kvcanary;
  m.doc() = "Custom calls of jax_kvcanary on CUDA devices.";
  m.def("registrations", [] {
    nb::dict targets;
    targets["kvcanary_verify"] = capsule(kVerify);
    targets["kvcanary_write"] = capsule(kWrite);
    targets["kvcanary_phase"] = capsule(kPhase);
    targets["kvcanary_report_phase"] = capsule(kReportPhase);
    return targets;
  });
}
