// Launchers on the host: they return when the work is done.
#pragma once

#include "kvcanary/verify.h"
#include "kvcanary/write.h"

namespace kvcanary::cpu {

void launch_verify(const VerifyLaunch& launch);
void launch_write(const WriteLaunch& launch);

}  // namespace kvcanary::cpu
