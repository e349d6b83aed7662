// Starts the page: each part registers what it listens to.

import {startAttachments} from "./attachments.js";
import {startChat} from "./chat.js";
import {startDefaults} from "./defaults.js";
import {startFrame} from "./frame.js";
import {startHistory} from "./history.js";
import {startLive} from "./live.js";
import {startOptions} from "./options.js";
import {awaitModel} from "./readiness.js";
import {startWelcome} from "./welcome.js";

startDefaults();
startOptions();
startWelcome();
startHistory();
startAttachments();
startChat();
startLive();
startFrame();
awaitModel();
